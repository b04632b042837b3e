"""What `benchmarks.manager admission` serves, and the traffic that it gets: all adapters in host memory, few slots."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

QUIET_TENANTS = 9


@dataclass(frozen=True)
class Serving:
    """A base model with adapters, and the mean number of tokens of an answer."""

    name: str
    adapters: int
    slots: int
    hidden: int
    layers: int
    rank: int
    tokens: int


@dataclass(frozen=True)
class Traffic:
    """Clients in a closed loop: each asks for what is drawn next, or always for an adapter of its own (`owned`).

    Attributes:
        zipf: the exponent by which adapters are drawn; 0 is uniform.
        owned: the adapter of each client.
    """

    name: str
    clients: int
    zipf: float = 0.0
    owned: tuple[int, ...] = ()

    def draws(self, adapters: int, tokens: int, seed: int, client: int = 0) -> Iterator[tuple[int, int]]:
        """Adapters and numbers of tokens: half to one and a half times as many.

        Those of all clients, or of one where each has an adapter of its own.
        """
        rng = random.Random(f"{seed}-{self.name}-{client if self.owned else 0}")
        cumulated = list(accumulate((rank + 1) ** -self.zipf for rank in range(adapters)))
        while True:
            adapter = rng.choices(range(adapters), cum_weights=cumulated)[0]
            length = rng.randint(tokens // 2, tokens * 3 // 2)
            yield (self.owned[client] if self.owned else adapter), length

    def most_asked(self) -> set[int]:
        """The adapter that is asked for most, where there is one."""
        return {0} if self.zipf or len(self.owned) > QUIET_TENANTS else set()

    def least_asked(self, adapters: int) -> set[int]:
        """The adapters that together get the last tenth of the requests; all, where they are asked for alike."""
        if self.owned:
            return set(range(1, 1 + QUIET_TENANTS))
        if not self.zipf:
            return set(range(adapters))
        cumulated = list(accumulate((rank + 1) ** -self.zipf for rank in range(adapters)))
        return {rank for rank in range(1, adapters) if cumulated[rank - 1] >= 0.89 * cumulated[-1]}


SERVINGS = (
    Serving("12/3", 12, 3, hidden=1024, layers=16, rank=64, tokens=8),  # 150 M parameters: long steps
    Serving("16/4", 16, 4, hidden=1024, layers=8, rank=64, tokens=8),
    Serving("40/3", 40, 3, hidden=256, layers=3, rank=16, tokens=16),  # steps of about 2.5 ms
)
DRAWN = tuple(
    Traffic(f"{name}, {clients} clients", clients, zipf)
    for name, zipf in (("uniform", 0.0), ("Zipf", 1.0))
    for clients in (9, 12, 48)
)
ALONE = Traffic("nine tenants alone", QUIET_TENANTS, owned=tuple(range(1, 1 + QUIET_TENANTS)))
FLOOD = Traffic("the nine and one that floods", 24 + QUIET_TENANTS, owned=(0,) * 24 + ALONE.owned)
FLOODED = "16/4"  # whose servers get the flood too


def traffic_of(serving: Serving) -> tuple[Traffic, ...]:
    return (*DRAWN, ALONE, FLOOD) if serving.name == FLOODED else DRAWN
