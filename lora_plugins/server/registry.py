"""What one API server serves: names, the versions behind them, and where these are; no vLLM, no torch.

vLLM's own table of names (`OpenAIServingModels.lora_requests`) is the truth, whoever writes it: vLLM's resolver loop,
its endpoints, or ours. What is known beyond it is kept here and dropped as soon as the table says otherwise.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lora_plugins.adapter.names import adapter_id
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot

KEPT_VERSIONS = 2


class Version(Protocol):
    """One version of an adapter in the store (`ResolvedAdapter`)."""

    @property
    def path(self) -> Path: ...
    @property
    def digest(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def uri(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def rank(self) -> int: ...


class Table(Protocol):
    """The part of vLLM's `OpenAIServingModels` that is read and written here."""

    lora_requests: dict[str, Any]


@dataclass(eq=False, slots=True)
class Served:
    """One name that requests can ask for.

    Attributes:
        request: vLLM's `LoRARequest`, with which new requests enter the engine.
        version: None for one that was loaded by its path.
        uri: where the operator said that it is; None where its name says it.
        previous: versions that a rollback can go to, the last one first; leased in the store.
        held_digest: the version that it was rolled back to, and stays at.
        is_pinned: stays in host memory and a slot.
        last_error: what went wrong last, and when, in seconds since 1970.
    """

    name: str
    request: Any
    version: Version | None = None
    uri: str | None = None
    previous: list[Version] = field(default_factory=list)
    held_digest: str | None = None
    is_pinned: bool = False
    last_error: tuple[LoRAPluginsError, float] | None = None

    def failed(self, error: LoRAPluginsError) -> None:
        """Note what went wrong; it goes on serving what it served."""
        self.last_error = (error, time.time())


def not_served(name: str) -> AdapterNotFound:
    """What to raise where a name is asked for that is not served."""
    return AdapterNotFound("no such adapter", expected="one that is served", remedy="see GET /v1/loras", adapter=name)


def no_longer_served(name: str) -> NoFreeSlot:
    """What a request gets that waited for an adapter which was unloaded meanwhile, and may be resolved anew."""
    return NoFreeSlot(
        "an adapter that was unloaded before there was a slot for this request",
        expected="one that is served",
        remedy="ask again: it is looked for at its source then",
        adapter=name,
    )


def blocked(name: str) -> AdapterNotFound:
    """What to raise where a name is asked for that was unloaded and blocked."""
    return AdapterNotFound(
        "a name that was unloaded and blocked",
        expected="one that is served",
        remedy="load it again with POST /v1/loras",
        adapter=name,
    )


class Catalogue:
    """The names of one API server.

    Args:
        table: vLLM's table of names.
        version_of: the version of a source that was last served under a name, None where there is none.
    """

    def __init__(self, table: Table, version_of: Any) -> None:
        self._table = table
        self._version_of = version_of
        self._served: dict[str, Served] = {}
        self._names_of_ids: dict[int, str] = {}
        self.draining: dict[int, Served] = {}  # unloaded, with requests that still run, by engine id
        self.blocked: set[str] = set()

    def get(self, name: str) -> Served | None:
        """What is served under this name now."""
        request = self._table.lora_requests.get(name)
        if request is None:
            self._served.pop(name, None)
            return None
        served = self._served.get(name)
        if served is None or served.request is not request:
            version = self._version_of(name)
            if version is not None and str(version.path) != request.lora_path:
                version = None
            served = self._served[name] = Served(name, request, version)
        return served

    def all(self) -> list[Served]:
        """Everything that is served now, in the order in which it came."""
        for gone in self._served.keys() - self._table.lora_requests.keys():
            del self._served[gone]
        return [served for name in list(self._table.lora_requests) if (served := self.get(name)) is not None]

    def put(self, served: Served) -> None:
        """From here on, requests for this name get what `served` says."""
        self._served[served.name] = served
        self._table.lora_requests[served.name] = served.request

    def expect(self, served: Served) -> None:
        """What to know of a request that vLLM is about to put into its table; forgotten if it does not."""
        self._served[served.name] = served

    def take_out(self, name: str) -> Served | None:
        """Serve this name no longer; a request that comes may have it resolved anew."""
        served = self.get(name)
        if served is not None:
            del self._table.lora_requests[name]
            del self._served[name]
        return served

    def lora_id(self, name: str) -> int:
        """The number of a name: the same on every replica and after every restart, and no other name's on this server.

        Of two names with the same number, the one that comes second here gets another.
        """
        for attempt in itertools.count():
            number = adapter_id(name if not attempt else f"{name}\0{attempt}")
            if self._names_of_ids.setdefault(number, name) == name:
                return number
        raise AssertionError("unreachable")

    def needs(self, name: str, path: Path) -> bool:
        """Whether a name may still need a version, as the one that it stands for or one to roll back to."""
        return any(
            version is not None and version.path == path
            for served in (self.get(name), *self.draining.values())
            if served is not None and served.name == name
            for version in (served.version, *served.previous)
        )
