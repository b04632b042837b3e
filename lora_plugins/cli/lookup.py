"""Names and URIs looked up as a server would, several at once, with each step's answer; `why` and `pull`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_plugins.absence import Absence
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import AdapterName
from lora_plugins.cli.names import AskedName
from lora_plugins.cli.output import Output
from lora_plugins.cli.progress import FetchBars
from lora_plugins.cli.sources import require_sources, sources_of_environment
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, SourceUnavailable, describing
from lora_plugins.events import AdapterResolved, AdapterUnknown, Event, Events
from lora_plugins.resolvers.known_versions import ResolvedAdapter
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source
from lora_plugins.resolvers.sources.uri import SourceUri
from lora_plugins.resolvers.versions import select_files
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.layout import Layout, is_digest, key_of
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.opening import open_store

_AT_ONCE = 8  # the resolver fetches four at once


SourceAnswer = RemoteAdapter | Absence | LoRAPluginsError


@dataclass(slots=True)
class LookUp:
    """A name or URI, the sources' answers, and the end of the look-up.

    Attributes:
        text: the name or URI asked for. name: the adapter's. uri: the place, if not where the sources have the name.
        answers: of the sources that were asked, by label.
        stored: the adapter in the store. located: with a dry run, the adapter to fetch.
        error: why there is neither; None where every source answers "no such adapter", as `absences` say.
    """

    text: str
    name: str
    uri: SourceUri | None = None
    answers: dict[str, SourceAnswer] = field(default_factory=dict)
    absences: tuple[Absence, ...] = ()
    stored: Stored | None = None
    located: WouldFetch | None = None
    error: LoRAPluginsError | None = None
    elapsed_s: float = 0.0

    @classmethod
    def of(cls, one: AskedName) -> LookUp:
        """Return the look-up of a name, or of a URI with a name for messages.

        Raises:
            LoRAPluginsError: the text is neither a name nor a URI.
        """
        text = one.uri or one.name
        try:
            if "://" not in text:
                return cls(text, str(AdapterName.parse(text)))
            uri = SourceUri.parse(text)
            return cls(text, _name_of(uri) if one.uri is None else str(AdapterName.parse(one.name)), uri)
        except LoRAPluginsError as error:
            if "://" not in one.name:  # the URI's fault may be a password
                error.adapter = error.adapter or one.name
            raise


@dataclass(frozen=True, slots=True)
class Stored:
    """An adapter that is in the store now, and the event that says how it came."""

    adapter: ResolvedAdapter
    manifest: Manifest
    event: AdapterResolved


@dataclass(frozen=True, slots=True)
class WouldFetch:
    """An adapter that a source has: the bytes to fetch, and the directory if the store has the adapter already."""

    adapter: RemoteAdapter
    size_bytes: int
    stored: Path | None

    def as_json(self) -> dict[str, Any]:
        """The fields of `located`."""
        return {
            "source": self.adapter.source,
            "uri": self.adapter.uri,
            "version": self.adapter.version,
            "files": [{"name": file.name, "size_bytes": file.size_bytes} for file in self.adapter.files],
            "size_bytes": self.size_bytes,
            "stored": None if self.stored is None else str(self.stored),
        }


def look_up(
    output: Output,
    settings: Settings,
    asked: Sequence[LookUp],
    base_path: str,
    base: BaseModel | None = None,
    *,
    dry_run: bool = False,
) -> list[str]:
    """Look up all names and URIs, each with its steps; return the labels of the sources, in their order.

    URIs need not be below an allowed prefix. A dry run asks the sources, and leaves the store as it is. Without `base`,
    adapters are compared with no base model.

    Raises:
        InvalidSettings: the environment has no source for a name; a source or the store cannot be made.
    """
    said = _Said(output, asked)
    uris = [str(_prefix(one.uri)) for one in asked if one.uri is not None]
    # Prefixes limit the clients of a server; the user of a command may read any URI.
    settings = replace(settings, allowed_uris=(*settings.allowed_uris, *uris))
    if base is None:
        settings = replace(settings, base_match=BaseMatch.OFF)
    sources = sources_of_environment(settings, said.on_answer)
    if len(uris) < len(asked):
        require_sources(sources)
    resolver = None
    if not dry_run:
        resolver = AdapterResolver(settings, Events(said.on_event), open_store(settings), sources)
        resolver.base = base
    turns = asyncio.Semaphore(_AT_ONCE)

    async def end(one: LookUp) -> None:
        async with turns:
            started = time.perf_counter()
            try:
                if resolver is None:
                    one.located = await _locate(sources, one.name, base_path, settings)
                else:
                    one.stored = await _store(resolver, one, base_path, said)
            except LoRAPluginsError as error:
                error.adapter = error.adapter or one.name
                one.error = error
            one.elapsed_s = time.perf_counter() - started
            said.bars.name_ended()

    async def end_all() -> None:
        await asyncio.gather(*map(end, asked))

    with said.bars:
        asyncio.run(end_all())
    return [source.label for source in sources]


class _Said:
    """The reports of sources and resolver, by look-up."""

    def __init__(self, output: Output, asked: Sequence[LookUp]) -> None:
        self._by_name = {one.name: one for one in asked}
        self.bars = FetchBars(output, asked[0].text if len(asked) == 1 else "", len(asked))
        self.resolved: dict[tuple[str, str], AdapterResolved] = {}  # by name and path: two URIs may have one name

    def on_answer(self, source: str, name: str, answer: SourceAnswer) -> None:
        self._by_name[name].answers[source] = answer

    def on_event(self, event: Event) -> None:
        self.bars.on_event(event)
        if isinstance(event, AdapterUnknown):
            self._by_name[event.name].absences = event.absences
        elif isinstance(event, AdapterResolved):
            # The first event says whether the bytes were fetched: a second look-up finds them in the store.
            self.resolved.setdefault((event.name, event.path), event)


async def _store(resolver: AdapterResolver, asked: LookUp, base_path: str, said: _Said) -> Stored | None:
    found: ResolvedAdapter | None
    if asked.uri is None:
        found = await resolver.resolve(asked.name, base_path)
    else:
        try:
            found = await resolver.resolve_uri(asked.name, asked.text, base_path)
        except AdapterNotFound as error:
            if asked.absences:  # otherwise something lies there, and the error names the fault
                error.found += ": " + "; ".join(map(str, asked.absences))
            raise
    if found is None:
        return None
    stored = Stored(found, Manifest.read(found.path), said.resolved[found.name, str(found.path)])
    # Nothing is served from here: a lease would only keep the adapter from eviction.
    resolver.store.release(found.name, found.path)
    return stored


async def _locate(sources: Sequence[Source], name: str, base_path: str, settings: Settings) -> WouldFetch | None:
    """Return what the first source that has the name would bring; None where every source lacks the name.

    Raises:
        LoRAPluginsError: as a server's resolver raises; an unavailable source hides no later source.
    """
    unavailable: SourceUnavailable | None = None
    for source in sources:
        with describing(adapter=name):
            try:
                found = await source.locate(AdapterName.parse(name), base_path)
            except SourceUnavailable as error:
                unavailable = unavailable or error
                continue
            if isinstance(found, RemoteAdapter):
                selected = select_files(found, settings)
                size_bytes = sum(file.size_bytes for file in selected.files)
                return WouldFetch(selected, size_bytes, _stored(settings, selected))
    if unavailable is not None:
        raise unavailable
    return None


def _stored(settings: Settings, adapter: RemoteAdapter) -> Path | None:
    layout = Layout(settings.store_dir)
    try:
        digest = (layout.folder("index") / key_of(adapter.uri, adapter.version)).read_text(errors="replace")
    except OSError:
        return None
    return layout.adapter(digest) if is_digest(digest) and layout.adapter(digest).is_dir() else None


def _prefix(uri: SourceUri) -> SourceUri:
    """Return the prefix that naming `uri` allows: its directory, or on the Hub its repository."""
    return SourceUri(uri.scheme, uri.authority, uri.segments[:1] if uri.scheme == "hf" else uri.segments[:-1])


def _name_of(uri: SourceUri) -> str:
    """Return a name for messages: the last part of the URI, where the part is a name."""
    last = uri.segments[-1] if uri.segments else ""
    try:
        return str(AdapterName.parse(last))
    except AdapterNotFound:
        return "unnamed"
