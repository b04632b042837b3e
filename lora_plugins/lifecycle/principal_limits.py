"""Limits of a principal (a key, or a tenant with several keys): a share of memory and store, and rates in a minute.

`Shares` limits the adapters in use at once, for `stored_copies.py`; `Rates` limits requests and tokens, for
`vllm_patches/api_server/access.py`. Both count in the leading API server, for all API servers of a deployment: a
follower asks the leader by `FollowedRates` and `followed_copies.py`.

A request above its principal's share waits for other requests of the principal to end, and is refused after a while.
Other principals notice nothing: a caller without a limit, such as an administrator, never waits here. A request for an
adapter that the principal already uses enters at once, because the request takes no more of the share.

Each limit of a minute is a bucket that holds a minute's worth and refills steadily. A request is admitted while both
buckets have at least one. The request's tokens are known, and taken, once the request has ended: the bucket may go
below zero, and admits again when it has refilled. So nothing predicts the length of an answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import cast

from lora_plugins.errors import NoFreeSlot, RateExceeded, SourceUnavailable
from lora_plugins.lifecycle.follower import Follower
from lora_plugins.resolvers.fair_places import Most, PlaceLimits, Places

_WAIT_S = 30.0
_WAITING = 10_000
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Share:
    """A principal's part of host memory and store: above 0, and 1 for no limit. `label` names the principal.

    Shares of one label are equal, because a new policy may change the part.
    """

    label: str
    part: float = field(compare=False)

    @property
    def is_limit(self) -> bool:
        """Whether the principal has less than the whole."""
        return self.part < 1


NO_LIMIT = Share("", 1.0)


class Shares:
    """The shares of all API servers of one deployment, counted in the first. For one event loop."""

    def __init__(self, places: int, max_bytes: int | None, *, wait_s: float = _WAIT_S) -> None:
        """Divide `places` for adapters in host memory, and `max_bytes` of adapters; None for no limit of bytes."""
        self._all = places
        self._max_bytes = max_bytes
        # No limit over all principals here: the engines' own slots and memory are that limit.
        self._places = Places(PlaceLimits(None, _WAITING, wait_s), self._refusal, self._most_of)

    def using(self, share: Share, adapter: str, size_bytes: int = 0) -> AbstractAsyncContextManager[object]:
        """Inside, a request of `share` uses an adapter, alone or beside other requests of the principal.

        One adapter is always allowed, however large.

        Raises:
            NoFreeSlot: after a while, where the adapter would exceed the share; at once, where too many requests wait.
        """
        return self._places.held(share, adapter, size_bytes) if share.is_limit else nullcontext()

    def _most_of(self, share: Hashable) -> Most:
        part = cast(Share, share).part
        return Most(max(1, int(part * self._all)), None if self._max_bytes is None else part * self._max_bytes)

    def _refusal(self, share: Hashable, in_use: int) -> NoFreeSlot:
        label, part, most = cast(Share, share).label, cast(Share, share).part, self._most_of(share).places
        return NoFreeSlot(
            f"{in_use} adapters of {label} in use at once, which is its share",
            expected=f"{most} of {self._all} at most, and {part:.0%} of the bytes",
            remedy="ask again once the requests that run have ended, or have the operator set its share in the policy",
        )


@dataclass(frozen=True, slots=True)
class Rate:
    """The limits of a principal, named by `label`; None for no limit."""

    label: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(slots=True)
class _Bucket:
    """What was taken of `per_minute` and has not refilled yet, as of `at_s`."""

    per_minute: int
    at_s: float
    taken: float = 0.0

    def take(self, count: int, now_s: float) -> None:
        """Refill until now, and take `count`, be it more than there is."""
        self.taken = max(0.0, self.taken - (now_s - self.at_s) * self.per_minute / _MINUTE_S) + count
        self.at_s = now_s

    def wait_s(self, now_s: float) -> int:
        """Return after how many seconds one can be taken, 0 for now."""
        self.take(0, now_s)
        return max(0, math.ceil((self.taken + 1 - self.per_minute) * _MINUTE_S / self.per_minute - 1e-6))


@dataclass(eq=False)
class Rates:
    """The buckets of all principals, which begin full. For one event loop; `clock` counts seconds."""

    clock: Callable[[], float] = time.monotonic
    _buckets: dict[tuple[str, str], _Bucket] = field(default_factory=dict)

    async def admit(self, rate: Rate) -> None:
        """Count a request that has arrived; a refused request takes nothing.

        Raises:
            RateExceeded: the principal has no request or no token left.
        """
        _refuse(rate, *self.wait(rate))

    def wait(self, rate: Rate) -> tuple[str, int]:
        """Count a request as `admit` does; for a refusal, return what is used up, and for how many seconds."""
        for unit in ("tokens", "requests"):
            bucket = self._bucket(rate, unit)
            if bucket is not None and (wait_s := bucket.wait_s(self.clock())):
                return unit, wait_s
        self._take(rate, "requests", 1)
        return "", 0

    def spend(self, rate: Rate, tokens: int) -> None:
        """Take the tokens of a request that has ended."""
        self._take(rate, "tokens", tokens)

    def _take(self, rate: Rate, unit: str, count: int) -> None:
        if (bucket := self._bucket(rate, unit)) is not None:
            bucket.take(count, self.clock())

    def _bucket(self, rate: Rate, unit: str) -> _Bucket | None:
        per_minute = rate.tokens_per_minute if unit == "tokens" else rate.requests_per_minute
        if per_minute is None:
            return None
        return self._buckets.setdefault((rate.label, unit), _Bucket(per_minute, self.clock()))


class FollowedRates(Rates):
    """The rates of a follower: limits cover all API servers, and the leader has the buckets."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower

    async def admit(self, rate: Rate) -> None:
        """Admit as `Rates.admit` does.

        Raises:
            RateExceeded: the principal has no request or no token left.
            SourceUnavailable: the leader is gone.
        """
        _refuse(rate, *(await self._follower.call("admit", rate=asdict(rate)))["wait"])

    def spend(self, rate: Rate, tokens: int) -> None:
        """Have the leader take the tokens of a request that has ended."""
        with suppress(SourceUnavailable):  # the leader is gone, and this server ends
            self._follower.tell("spend", rate=asdict(rate), tokens=tokens)


def _refuse(rate: Rate, unit: str, wait_s: int) -> None:
    if not wait_s:
        return
    limit = rate.tokens_per_minute if unit == "tokens" else rate.requests_per_minute
    refusal = RateExceeded(
        f"more {unit} of {rate.label} than its limit",
        expected=f"{limit} {unit} a minute at most",
        remedy=f"ask again after Retry-After, or have the operator raise {unit}_per_minute in the policy",
    )
    refusal.retry_after_s = wait_s
    raise refusal
