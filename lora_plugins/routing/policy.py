"""What every routing policy can be asked, and what it is notified of. No I/O, no threads; times are the caller's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Tier(IntEnum):
    """Where a replica has an adapter; the lower, the sooner its first token.

    `LOADING`: a request went there for it, and neither was answered nor has the replica reported since.
    """

    SLOT = 0
    HOST = 1
    LOADING = 2
    STORE = 3
    NOWHERE = 4


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself.

    Attributes:
        adapters: where it has which adapters; a name that is left out is nowhere.
        capacity: how many adapters its host cache takes; None where that is unknown.
        requests: how many it has in flight, held ones among them, from whichever router; None where that is unknown.
    """

    adapters: Mapping[str, Tier]
    capacity: int | None = None
    requests: int | None = None


class RoutingPolicy(Protocol):
    """Chooses replicas for requests; the empty name stands for the base model."""

    def join(self, replica: str) -> None:
        """Route to this replica too; one that is there already is left as it is."""

    def leave(self, replica: str) -> None:
        """Route to it no longer, and forget what it had; one that is not there is left alone."""

    def ranked(self, adapter: str, now_s: float, excluded: Collection[str] = ()) -> Sequence[str]:
        """The replicas to try for a request, best first: at least one where any is left; `excluded` are left out."""

    def routed(self, adapter: str, replica: str, now_s: float) -> None:
        """Note that a request went to a replica."""

    def completed(self, adapter: str, replica: str, now_s: float) -> None:
        """Note that a routed request has ended, in whichever way."""

    def reported(self, replica: str, report: Report, now_s: float) -> None:
        """Note what a replica says of itself; of one that is not there it is left alone."""
