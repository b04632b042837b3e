"""What one API server serves: names, the versions behind them, and where these are; no vLLM, no torch.

vLLM's own table of names (`OpenAIServingModels.lora_requests`) is the truth, whoever writes it: vLLM's resolver loop,
its endpoints, or ours. What is known beyond it is kept here and dropped as soon as the table says otherwise.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lora_plugins.adapter.names import adapter_id
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot
from lora_plugins.resolvers.sources.uri import is_path
from lora_plugins.resolvers.versions import ResolvedAdapter
from lora_plugins.store.blocks import Blocks


class NameTable(Protocol):
    """The part of vLLM's `OpenAIServingModels` that is read and written here."""

    lora_requests: dict[str, Any]


@dataclass(eq=False, slots=True)
class ServedAdapter:
    """One name that requests can ask for.

    Attributes:
        request: vLLM's `LoRARequest`, with which new requests enter the engine.
        version: None for one that was loaded by its Hub id, past our resolvers.
        uri: where the operator said that it is, or the path that vLLM's own call named; None where its name says it.
        previous: versions that a rollback can go to, the last one first; leased in the store.
        held_digest: the version that it stays at: it was rolled back to it, or loaded by its path.
        is_pinned: stays in host memory and a slot.
        is_damaged: its copy in the store was found damaged; it is fetched and loaded again before the next request.
        is_only_copy: when its source was asked last, that had another version that cannot be served, or none.
        last_error: what went wrong last, and when, in seconds since 1970.
    """

    name: str
    request: Any
    version: ResolvedAdapter | None = None
    uri: str | None = None
    previous: list[ResolvedAdapter] = field(default_factory=list)
    held_digest: str | None = None
    is_pinned: bool = False
    is_damaged: bool = False
    is_only_copy: bool = False
    last_error: tuple[LoRAPluginsError, float] | None = None

    @property
    def engine_id(self) -> int:
        """The number that the engine has for the version that new requests get."""
        return int(self.request.lora_int_id)

    @property
    def digest(self) -> str | None:
        """Of the version that new requests get; None for an adapter that was loaded by its Hub id."""
        return None if self.version is None else self.version.digest

    @property
    def versions(self) -> list[ResolvedAdapter]:
        """All that are leased for it: the present one, and those to roll back to."""
        return self.previous if self.version is None else [self.version, *self.previous]

    @property
    def given_path(self) -> str | None:
        """The directory that vLLM's own call named."""
        return self.uri if is_path(self.uri) else None

    def failed(self, error: LoRAPluginsError) -> None:
        """Note what went wrong; it goes on serving what it served."""
        self.last_error = (error, time.time())


def not_served(name: str) -> AdapterNotFound:
    """What to raise where a name is asked for that is not served."""
    return AdapterNotFound("no such adapter", expected="one that is served", remedy="see GET /v1/loras", adapter=name)


def gone_from_source(name: str) -> AdapterNotFound:
    """What to raise where a newer version is looked for, and there is none at all."""
    return AdapterNotFound(
        "no such adapter at its source any more",
        expected="the one that is served, or a newer one",
        remedy="put it back, or unload it",
        adapter=name,
    )


def no_longer_served(name: str) -> NoFreeSlot:
    """What a request gets that waited for an adapter which was unloaded meanwhile, and may be resolved again."""
    return NoFreeSlot(
        "an adapter that was unloaded before there was a slot for this request",
        expected="one that is served",
        remedy="ask again: it is looked for at its source then",
        adapter=name,
    )


class Registry:
    """The names of one API server.

    Args:
        table: vLLM's table of names.
        version_of: the version of a source that was last resolved for a name, None where there is none.
        blocked: names that are refused until they are loaded again, whatever the table says.

    Attributes:
        draining: adapters that were unloaded, with requests that still run, by engine id.
        paused: names whose requests the engines hold until a resume.
    """

    def __init__(self, table: NameTable, version_of: Callable[[str], ResolvedAdapter | None], blocked: Blocks) -> None:
        self._table = table
        self._version_of = version_of
        self._adapters: dict[str, ServedAdapter] = {}
        self._names_of_ids: dict[int, str] = {}
        self.draining: dict[int, ServedAdapter] = {}
        self.paused: set[str] = set()
        self.blocked = blocked

    def get(self, name: str) -> ServedAdapter | None:
        """What is served under this name now."""
        request = self._table.lora_requests.get(name)
        if request is None:
            self._adapters.pop(name, None)
            return None
        adapter = self._adapters.get(name)
        if adapter is None or adapter.request is not request:
            version = self._version_of(name)
            if version is not None and str(version.path) != request.lora_path:
                version = None
            adapter = self._adapters[name] = ServedAdapter(name, request, version)
        return adapter

    def require(self, name: str) -> ServedAdapter:
        """As `get`.

        Raises:
            AdapterNotFound: it is blocked, or not served.
        """
        self.blocked.refuse(name)
        adapter = self.get(name)
        if adapter is None:
            raise not_served(name)
        return adapter

    def serves(self, name: str) -> bool:
        """Whether a name is in the table now. Callable from any thread."""
        return name in self._table.lora_requests

    def names(self) -> list[str]:
        """All names that are served now, in the order in which they came; a millisecond for 100,000."""
        return list(self._table.lora_requests)

    def all(self) -> list[ServedAdapter]:
        """Everything that is served now, in the order in which it came."""
        for gone in self._adapters.keys() - self._table.lora_requests.keys():
            del self._adapters[gone]
        return [adapter for name in list(self._table.lora_requests) if (adapter := self.get(name)) is not None]

    def put(self, adapter: ServedAdapter) -> None:
        """From here on, requests for this name get what `adapter` says."""
        self._adapters[adapter.name] = adapter
        self._table.lora_requests[adapter.name] = adapter.request

    def remove(self, name: str) -> ServedAdapter | None:
        """Serve this name no longer; a request that comes may have it resolved again."""
        if self.get(name) is not None:
            del self._table.lora_requests[name]
        return self.forget(name)

    def forget(self, name: str) -> ServedAdapter | None:
        """What was known of a name that vLLM has just taken out of its table."""
        return self._adapters.pop(name, None)

    def adapter_id(self, name: str) -> int:
        """The number of a name: the same on every replica and after every restart, and no other name's on this server.

        Of two names with the same number, the one that comes second here gets another.
        """
        for attempt in itertools.count():
            number = adapter_id(name if not attempt else f"{name}\0{attempt}")
            if self._names_of_ids.setdefault(number, name) == name:
                return number
        raise AssertionError("unreachable")

    def needs(self, name: str, version: ResolvedAdapter) -> bool:
        """Whether a name still needs a version: served, to roll back to, or for requests that still run."""
        adapters = [adapter for adapter in self.draining.values() if adapter.name == name]
        present = self.get(name)
        if present is not None:
            adapters.append(present)
        return any(leased.path == version.path for adapter in adapters for leased in adapter.versions)
