"""The registry: the names that an API server serves, each with its version and its state.

Used in the event loop of each API server: `lifecycle.py` changes the registry, and `api/` lists what it holds. vLLM's
own table of names (`OpenAIServingModels.lora_requests`) is the truth, whoever writes the table: vLLM's resolver loop,
vLLM's endpoints, or this package. The registry adds versions and states to the table's names, and drops an entry as
soon as the table has another request for the name. `DesiredAdapter` describes a name that a server is to serve, for
`reconciler.py` and its files. No vLLM, no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_plugins.adapter.names import adapter_id, is_by_digest, misspelt
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot, VersionMismatch
from lora_plugins.resolvers.known_versions import ResolvedAdapter
from lora_plugins.resolvers.sources.uri import is_by_path
from lora_plugins.store.blocked_names import Blocks

ANY_VERSION = "*"  # a caller's expected version, as in HTTP's If-Match
OPERATOR = object()  # the caller where no request has made a mixture


@dataclass(eq=False, slots=True)
class ServedAdapter:
    """One name that requests can ask for.

    Attributes:
        request: vLLM's `LoRARequest`, with which new requests enter the engine; None before the first load.
        version: None for an adapter that only the workers have, past this package's resolvers.
        uri: the place that the operator gave, or the path that vLLM's own call named; None where the name is enough.
        base_name: the served name of the base model that vLLM's own call named; None for the first.
        previous: versions for a rollback, the latest first; leased in the store.
        caller: of a mixture that requests have made, the label of the first; `OPERATOR` for other adapters.
        held_digest: the fixed digest: after a rollback, a load by path, a push, or a declared digest.
        is_pinned: stays in host memory and a slot.
        is_damaged: the store's copy was found damaged, and is fetched and loaded again before the next request.
        is_only_copy: at the last question, the source had no version, or only another version that cannot be served.
        last_error: the last error, and its time in seconds since 1970.
        loading: the load that a request has begun, and that the engines have not ended; None without.
        freeing: of an unloaded adapter, what is done when all is free. ended: requests that the unload has ended.
    """

    name: str
    request: Any = None
    version: ResolvedAdapter | None = None
    uri: str | None = None
    base_name: str | None = None
    caller: Hashable = OPERATOR
    previous: list[ResolvedAdapter] = field(default_factory=list)
    held_digest: str | None = None
    is_pinned: bool = False
    is_damaged: bool = False
    is_only_copy: bool = False
    last_error: tuple[LoRAPluginsError, float] | None = None
    loading: asyncio.Task[None] | None = None
    freeing: asyncio.Task[None] | None = None
    ended: int = 0

    @property
    def is_served(self) -> bool:
        """Whether requests get a version, which the engines have loaded or are loading."""
        return self.request is not None

    @property
    def engine_id(self) -> int:
        """The engine's number for the version that new requests get."""
        return int(self.request.lora_int_id)

    @property
    def digest(self) -> str | None:
        """The digest of the version that new requests get; None for an adapter that only workers have."""
        return None if self.version is None else self.version.digest

    @property
    def is_by_digest(self) -> bool:
        """Whether the name is `NAME@DIGEST`: a request has asked for this version of another name."""
        return self.uri is None and self.held_digest is not None and is_by_digest(self.name, self.held_digest)

    @property
    def versions(self) -> list[ResolvedAdapter]:
        """All leased versions: the present version, and versions for a rollback."""
        return self.previous if self.version is None else [self.version, *self.previous]

    @property
    def given_path(self) -> str | None:
        """The directory, or the Hub's repository, that vLLM's own call named; None for other adapters."""
        return self.uri if is_by_path(self.uri) else None

    def now_serves(self, version: ResolvedAdapter | None, uri: str | None, held_digest: str | None) -> None:
        """Note the version that new requests get, and its place; what was wrong with the name is over."""
        self.version, self.uri, self.held_digest = version, uri, held_digest
        self.last_error, self.is_damaged, self.is_only_copy = None, False, False

    def failed(self, error: LoRAPluginsError) -> None:
        """Note an error; the name goes on serving its version."""
        self.last_error = (error, time.time())


@dataclass(frozen=True, slots=True)
class DesiredAdapter:
    """One adapter to serve.

    Attributes:
        uri: the place with its revision; None: any source of the server that has the name.
        held_digest: the digest of the only version to serve; None for the newest.
        is_pinned: keep the adapter in host memory and a slot.
        is_awaited: the server becomes ready only after a try of this adapter; no effect on a running server.
        last_digest: digest of the version that the server before this one served; None where no server wrote any.
            Of a declared adapter: the version that the server before this one was rolled back to.
        last_place: source of the version of `last_digest`, as `AdapterResolver.place_of` says.
        was_declared: the file of the server before this one declared the adapter.
    """

    name: str
    uri: str | None = None
    held_digest: str | None = None
    is_pinned: bool = False
    is_awaited: bool = field(default=True, compare=False)
    last_digest: str | None = field(default=None, compare=False)
    last_place: str = field(default="", compare=False)
    was_declared: bool = field(default=False, compare=False)


def gone_from_source(name: str) -> AdapterNotFound:
    """The error where the source of a served adapter has no version any more."""
    return AdapterNotFound(
        "no such adapter at its source any more",
        expected="the one that is served, or a newer one",
        remedy="put it back, or unload it",
        adapter=name,
    )


def no_longer_served(name: str) -> NoFreeSlot:
    """The error for a request whose adapter was unloaded meanwhile, and may be resolved again."""
    return NoFreeSlot(
        "an adapter that was unloaded before this request could run",
        expected="one that is served",
        remedy="ask again: it is looked for at its source then",
        adapter=name,
    )


@dataclass(eq=False)
class Registry:
    """The names of one API server.

    Attributes:
        table: vLLM's `OpenAIServingModels`, whose `lora_requests` are read and written.
        version_of: the version of a source that was last resolved for a name; None where there is no version.
        blocked: names that are refused until an operator loads them, whatever the table says.
        near: names like a misspelt one, which the present request may use.
        draining: unloaded adapters with running requests, by engine id.
        paused: names whose requests the engines hold until a resume.
        on_stale: called with a mixture that is served no longer, because a part has changed.
    """

    table: Any
    version_of: Callable[[str], ResolvedAdapter | None]
    blocked: Blocks
    near: Callable[[str], Sequence[str]] = lambda _: ()
    draining: dict[int, ServedAdapter] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    on_stale: Callable[[ServedAdapter], object] = lambda _: None
    _adapters: dict[str, ServedAdapter] = field(default_factory=dict)
    # Names of served mixtures, with the digests of their parts by the parts' names.
    _mixtures: dict[str, dict[str, str]] = field(default_factory=dict)
    _names_of_ids: dict[int, str] = field(default_factory=dict)

    def get(self, name: str) -> ServedAdapter | None:
        """The adapter served under this name now; None where the name is not served."""
        request = self.table.lora_requests.get(name)
        if request is None:
            self._adapters.pop(name, None)
            return None
        adapter = self._adapters.get(name)
        # `is not`, because requests of one name are equal (`LoRARequest.__eq__` in vllm/lora/request.py, 0.32).
        # Another writer, such as vLLM's resolver, has put a new request into the table: the former entry is void.
        if adapter is None or adapter.request is not request:
            version = self.version_of(name)
            # The request has another path than the version last resolved, so the version is not of this request.
            if version is not None and str(version.path) != request.lora_path:
                version = None
            adapter = self._adapters[name] = ServedAdapter(name, request, version)
        return adapter

    def require(self, name: str) -> ServedAdapter:
        """Get as `get` does.

        Raises:
            AdapterNotFound: the name is blocked, or not served.
        """
        self.blocked.refuse(name)
        adapter = self.get(name)
        if adapter is None:
            raise self.not_served(name)
        return adapter

    def check_version(self, name: str, expects: str | None) -> None:
        """Compare the version of a name with the digest that a caller expects, or `ANY_VERSION`; None: any, or none.

        Raises:
            VersionMismatch: another version is served, or none.
        """
        adapter = self.get(name)
        digest = None if adapter is None else adapter.digest
        if expects is None or (digest is not None and expects in (digest, ANY_VERSION)):
            return
        raise VersionMismatch(
            "no version" if digest is None else f"version {digest}",
            expected=expects,
            remedy="look at what is served now (GET /v1/loras), and decide again",
            adapter=name,
        )

    def not_served(self, name: str) -> AdapterNotFound:
        return misspelt(name, self.near(name)) or AdapterNotFound(
            "no such adapter", expected="one that is served", remedy="see GET /v1/loras", adapter=name
        )

    def serves(self, name: str) -> bool:
        """Whether a name is in the table now. Callable from any thread."""
        return name in self.table.lora_requests

    def names(self) -> list[str]:
        """All names served now, in order of arrival; takes a millisecond for 100,000 names."""
        return list(self.table.lora_requests)

    def all(self) -> list[ServedAdapter]:
        """All adapters served now, in order of arrival."""
        for gone in self._adapters.keys() - self.table.lora_requests.keys():
            del self._adapters[gone]
        return [adapter for name in list(self.table.lora_requests) if (adapter := self.get(name)) is not None]

    def put(self, adapter: ServedAdapter) -> None:
        """Have later requests for the name enter the engine with the adapter's request."""
        name, digest, version = adapter.name, adapter.digest, adapter.version
        self._adapters[name] = adapter
        self.table.lora_requests[name] = adapter.request
        stale = [it for it, parts in self._mixtures.items() if parts.get(name, digest) != digest]
        if version is not None and version.parts:
            self._mixtures[name] = version.parts
            stale += [name] if self.is_stale(version) else []
        self._end_mixtures(stale)

    def remove(self, name: str) -> ServedAdapter | None:
        """Stop serving this name; a later request may resolve the name again."""
        if self.get(name) is not None:
            del self.table.lora_requests[name]
        self._mixtures.pop(name, None)
        self._end_mixtures([it for it, parts in self._mixtures.items() if name in parts])
        return self._adapters.pop(name, None)

    def mixtures_of(self, caller: Hashable) -> list[ServedAdapter]:
        return [it for name in self._mixtures if (it := self.get(name)) is not None and it.caller == caller]

    def is_stale(self, version: ResolvedAdapter) -> bool:
        """Whether a part of a mixture is served in another version than the mixture was made of."""
        return any((it := self.get(part)) and it.digest != digest for part, digest in version.parts.items())

    def _end_mixtures(self, names: Iterable[str]) -> None:
        """Serve mixtures no longer whose part has changed: the next request of the name gets a new mixture."""
        for name in names:
            if (mixture := self.remove(name)) is not None:
                self.on_stale(mixture)

    def adapter_id(self, name: str) -> int:
        """The number of a name: the same on every replica and after every restart, and unique on this server.

        Where two names have the same number, the later name gets another number.
        """
        # 31 bits: of 10,000 names two have one number with a probability of 2 %.
        number, others = adapter_id(name), 0
        while self._names_of_ids.setdefault(number, name) != name:
            others += 1
            number = adapter_id(f"{name}\0{others}")
        return number

    def needs(self, name: str, version: ResolvedAdapter) -> bool:
        """Whether a name needs a version: to serve, for a rollback, or for running requests."""
        adapters = [self.get(name), *(adapter for adapter in self.draining.values() if adapter.name == name)]
        return any(leased.path == version.path for it in adapters if it is not None for leased in it.versions)
