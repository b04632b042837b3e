"""Events: frozen facts about adapters, sources and requests, for hooks that log and count them.

The logic of an API server or of the command line emits events, and `Events` calls every hook in the same thread: the
log (`observability/logs.py`), metrics (`observability/event_metrics.py`), progress bars. No logic logs such facts
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from lora_plugins.absence import Absence
from lora_plugins.errors import LoRAPluginsError


@dataclass(frozen=True, slots=True)
class Event:
    """A fact; every class below is one."""


@dataclass(frozen=True, slots=True)
class Named(Event):
    """A fact about a name."""

    name: str


@dataclass(frozen=True, slots=True)
class OfName(Named):
    """A fact about a name and the source that was, or was not, asked for the name."""

    source: str


@dataclass(frozen=True, slots=True)
class NotFound(OfName):
    """A source gave no adapter for a name."""

    error: LoRAPluginsError


@dataclass(frozen=True, slots=True)
class AdapterResolved(OfName):
    """A name was found and its adapter verified; the engine will read `path`.

    `locate_s` was spent asking sources, `obtain_s` finding the adapter in the store or fetching (`fetched`), `check_s`
    validating against the base model. `notes` are tolerated oddities, `warnings` are for clients too.
    """

    path: str
    rank: int
    size_bytes: int
    locate_s: float
    obtain_s: float
    check_s: float
    fetched: bool
    notes: tuple[str, ...] = ()
    uri: str = ""
    warnings: tuple[str, ...] = ()


class AdapterConfirmed(OfName):
    """A name was asked for again, and the earlier answer still holds."""


@dataclass(frozen=True, slots=True)
class FetchStarted(OfName):
    """The files of a version, each with its bytes, are about to arrive in a directory of the store."""

    directory: str
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class FetchGoesOn(OfName):
    """A fetch that has started is slow: after `took_s` seconds, `arrived_bytes` of `size_bytes` are on the disk."""

    took_s: float
    arrived_bytes: int
    size_bytes: int


class FetchEnded(OfName):
    """A fetch that has started is over, however it went."""


@dataclass(frozen=True, slots=True)
class AdapterFetched(OfName):
    """A version was fetched from its source, verified and published in the store."""

    uri: str
    size_bytes: int
    fetch_s: float


class AdapterRejected(NotFound):
    """A source has the adapter, but the adapter is not served."""


class SourceFailed(NotFound):
    """A source did not answer whether it has the adapter."""


class AdapterDenied(NotFound):
    """A source answered that this server may not read the adapter, which is private or gated."""


@dataclass(frozen=True, slots=True)
class BreakerOpened(Event):
    """A source does not answer, as `error` says; names are refused at once, and a look-up now and then tries again."""

    source: str
    error: LoRAPluginsError


@dataclass(frozen=True, slots=True)
class BreakerClosed(Event):
    """A source answers again, after `open_s` seconds in which names were refused."""

    source: str
    open_s: float


class LookUpRefused(NotFound):
    """A source was not asked, because too many unknown names wait for the source."""


@dataclass(frozen=True, slots=True)
class AdapterUnknown(Named):
    """Every source answered, and none has the adapter.

    `reason` says why, if the name itself is at fault and no source was asked; else `absences` are the sources' answers.
    """

    reason: str = ""
    absences: tuple[Absence, ...] = ()


class AbsenceRemembered(OfName):
    """A source was not asked, because the source answered recently "no such adapter"."""


@dataclass(frozen=True, slots=True)
class StoreEvicted(Event):
    """A published adapter was removed from the store to make room; emitted from a thread."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreDamaged(Event):
    """A published adapter has other bytes than its digest says, and is served no more. Emitted from any thread."""

    digest: str


class RequestServed(Named):
    """The engine has begun to answer a request for an adapter."""


@dataclass(frozen=True, slots=True)
class RequestEnded(Named):
    """A request, or one of several choices, is over, however it ended; it adds these tokens to the adapter's.

    The first choice that ends adds the prompt's tokens and the seconds to the first token, None if nobody knows.
    """

    prompt_tokens: int
    generated_tokens: int
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class NotServed(Event):
    """An adapter that was found cannot be served.

    Attributes:
        stage: `request`, of a request; `load`, loaded without a request; `update`, a new version at the source, and the
            old version goes on; `declared`, an adapter of the declared file, which is tried again.
    """

    stage: str
    name: str
    error: LoRAPluginsError


@dataclass(frozen=True, slots=True)
class KeyRefused(Event):
    """A request of a tenant of the access policy, named by `label`, was refused for its key's limits."""

    label: str
    error: LoRAPluginsError


@dataclass(frozen=True, slots=True)
class AdapterLoaded(Named):
    """Every worker has loaded an adapter from its directory into its host cache."""

    path: str
    size_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True)
class AdapterSwapped(Named):
    """A name points to another version; running requests go on with the old version.

    Versions are digests, or paths that only workers have; the same digest twice if a damaged copy was replaced.
    """

    before: str
    after: str
    load_s: float


@dataclass(frozen=True, slots=True)
class AdapterUnloaded(Named):
    """No request uses the adapter; slot, host memory and lease are free. `aborted` requests were ended for that."""

    drain_s: float
    aborted: int


@dataclass(frozen=True, slots=True)
class DeclaredSetReconciled(Event):
    """Every declared adapter was tried: how many there are, how many are served, and how many failed."""

    declared: int
    served: int
    failed: int


@dataclass(frozen=True, slots=True)
class DeclaredFileInvalid(Event):
    """The present file of declared adapters cannot be followed; the adapters declared before go on."""

    error: LoRAPluginsError


Hook = Callable[[Event], None]
_polls: ContextVar[bool] = ContextVar("lora_plugins_polls", default=False)


@contextmanager
def polling() -> Iterator[None]:
    """Mark look-ups inside, and in tasks begun inside, as for no request: for new versions, or for a declared set."""
    token = _polls.set(True)
    try:
        yield
    finally:
        _polls.reset(token)


def is_polling() -> bool:
    """Return whether the present look-up is for no request: `polling`."""
    return _polls.get()


class Events:
    """Hands each event to every hook, in the order in which they were added."""

    def __init__(self, *hooks: Hook) -> None:
        self._hooks = list(hooks)

    def add(self, hook: Hook) -> None:
        """Call `hook` with every further event."""
        self._hooks.append(hook)

    def emit(self, event: Event) -> None:
        # In the emitting thread: hooks must be short, and safe in any thread.
        for hook in self._hooks:
            hook(event)
