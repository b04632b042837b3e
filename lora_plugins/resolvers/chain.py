"""From a requested name to a verified adapter: ask the sources in order, verify what the first one has."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.adapter.verify import VerifiedAdapter, verify_adapter
from lora_plugins.base_model import BaseModel
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, SourceUnavailable, describing
from lora_plugins.events import AdapterRejected, AdapterResolved, AdapterUnknown, Events, SourceFailed
from lora_plugins.names import AdapterName
from lora_plugins.resolvers.source import Located, Source
from lora_plugins.settings import Settings


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """A verified adapter under the name that was asked for; `path` is absolute and what the engine reads."""

    name: str
    lora_id: int
    path: Path
    source: str


class SourceChain:
    """The sources of one server, in the order in which they are asked.

    The first source that has the name decides. One that cannot say does not hide a later one; if no later one has
    the name either, its error is raised, because "no such adapter" would be a guess.
    """

    def __init__(
        self,
        settings: Settings,
        events: Events,
        sources: Sequence[Source] = (),
        executor: Executor | None = None,
    ) -> None:
        self.sources = list(sources)
        self.base: BaseModel | None = None
        self.settings = settings
        self._events = events
        self._executor = executor

    async def resolve(self, text: str, base_path: str) -> ResolvedAdapter | None:
        """Find and verify the adapter called `text`; None where every source says that there is none.

        `base_path` stands in for the base model until `self.base` is set.

        Raises:
            LoRAPluginsError: it is there but cannot be served, or a source cannot say.
        """
        try:
            name = AdapterName.parse(text)
        except AdapterNotFound as error:
            self._events.emit(AdapterUnknown(text, error.found))
            return None
        started = time.perf_counter()
        located = await self._locate(name)
        if located is None:
            self._events.emit(AdapterUnknown(text))
            return None
        locate_s = time.perf_counter() - started
        base = self.base or BaseModel(base_path)
        try:
            verified = await asyncio.get_running_loop().run_in_executor(self._executor, self._verify, located, base)
        except LoRAPluginsError as error:
            self._report(name, located.source, error)
            raise
        self._events.emit(
            AdapterResolved(
                name=text,
                source=located.source,
                path=str(located.directory),
                rank=verified.config.max_rank,
                size_bytes=verified.size_bytes,
                locate_s=locate_s,
                verify_s=time.perf_counter() - started - locate_s,
                notes=verified.notes,
            )
        )
        return ResolvedAdapter(text, lora_id(text), located.directory.absolute(), located.source)

    async def _locate(self, name: AdapterName) -> Located | None:
        unavailable: SourceUnavailable | None = None
        for source in self.sources:
            try:
                with describing(adapter=str(name)):
                    located = await source.locate(name)
            except SourceUnavailable as error:
                self._report(name, source.label, error)
                unavailable = unavailable or error
            except LoRAPluginsError as error:
                self._report(name, source.label, error)
                raise
            else:
                if located is not None:
                    return located
        if unavailable is not None:
            raise unavailable
        return None

    def _verify(self, located: Located, base: BaseModel) -> VerifiedAdapter:
        with describing(adapter=str(located.name)):
            return verify_adapter(located.directory, base, self.settings, inside=located.inside)

    def _report(self, name: AdapterName, source: str, error: LoRAPluginsError) -> None:
        kind = SourceFailed if isinstance(error, SourceUnavailable) else AdapterRejected
        self._events.emit(kind(str(name), source, error))


def lora_id(name: str) -> int:
    """A number for a name that is the same on every replica and after every restart: 1 to 2**31 - 1."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % (2**31 - 1) + 1
