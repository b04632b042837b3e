"""`pull`, and `look_up`: ask this environment's sources for adapters, as a server would at a first request.

Runs in the command's process, without a server; `why` and `inspect` of a URI use `look_up` too. In: names and URIs, as
`LookUp` objects, several of them at the same time. Out: each `LookUp` with the adapter verified in the store, or with
the adapter that a dry run has found and not fetched, or with an error.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import AdapterName
from lora_plugins.cli.name_arguments import AskedName, NamesFile, expand, malformed, wanted
from lora_plugins.cli.output import Output, Result, line, listed, size
from lora_plugins.cli.progress_bars import FetchBars
from lora_plugins.cli.sources import names_of_environment, require_sources, sources_of_environment
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.events import AdapterResolved, Events, FetchStarted
from lora_plugins.resolvers.file_selection import select_files
from lora_plugins.resolvers.known_versions import ResolvedAdapter
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.search import LookedUp, Query, SourceSearch
from lora_plugins.resolvers.sources.source import RemoteAdapter
from lora_plugins.resolvers.sources.uri import SourceUri
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.layout import Layout, is_digest, key_of
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.store import open_store

_AT_ONCE = 8  # look-ups; twice the four fetches that the resolver runs at a time, so that searches go on meanwhile


@dataclass(slots=True)
class LookUp:
    """A name or URI, and what the look-up has found out.

    Attributes:
        text: the name or URI asked for. name: the adapter's. uri: the place asked for; None for wherever the sources
            have the name.
        found: what the sources have answered, with the error if any; empty before the look-up.
        stored: the adapter in the store; None after a dry run, and where no source has the adapter.
        would_fetch: the adapter that a dry run has found; None otherwise.
        elapsed_s: seconds for this look-up, in which others may have run too.
    """

    text: str
    name: str
    uri: SourceUri | None = None
    found: LookedUp = field(default_factory=LookedUp)
    stored: Stored | None = None
    would_fetch: WouldFetch | None = None
    elapsed_s: float = 0.0

    @classmethod
    def of(cls, one: AskedName) -> LookUp:
        """Return the look-up of a name or a URI; with an error where the text is neither.

        A URI given without a name gets a name for messages.
        """
        asked = cls(one.uri or one.name, one.name)
        try:
            if "://" in asked.text:
                asked.uri = SourceUri.parse(asked.text)
            if asked.uri is not None and one.uri is None:
                asked.name = _name_of(asked.uri)
            else:
                asked.name = str(AdapterName.parse(one.name))
        except LoRAPluginsError as error:
            if "://" not in one.name:  # a message must not repeat a URI, which may have a password
                error.adapter = error.adapter or one.name
            if one.name.startswith(("/", "./", "../", "~/")) and one.uri is None:
                # Not `Path.expanduser`, which raises where the user has no home directory.
                path = Path(os.path.expanduser(one.name)).absolute()
                error.remedy = f"for a directory of this machine use {path.as_uri()}"
            asked.found.error = error
        return asked


@dataclass(frozen=True, slots=True)
class Stored:
    """An adapter that is in the store now; `facts` says whether and how fast a fetch has brought the adapter there."""

    adapter: ResolvedAdapter
    manifest: Manifest
    facts: AdapterResolved


@dataclass(frozen=True, slots=True)
class WouldFetch:
    """An adapter that a source has, and the size of its files.

    `stored` is the adapter's directory where the store has the adapter already, so that nothing would be fetched.
    """

    adapter: RemoteAdapter
    size_bytes: int
    stored: Path | None

    def as_json(self) -> dict[str, Any]:
        """The fields of `located` in the JSON output of `why`."""
        same = {name: getattr(self.adapter, name) for name in ("source", "uri", "version")}
        files = [{"name": file.name, "size_bytes": file.size_bytes} for file in self.adapter.files]
        stored = None if self.stored is None else str(self.stored)
        return {**same, "files": files, "size_bytes": self.size_bytes, "stored": stored}


def look_up(
    output: Output,
    settings: Settings,
    asked: Sequence[LookUp],
    base_path: str,
    base: BaseModel | None = None,
    *,
    dry_run: bool = False,
    before_fetch: str = "",
) -> list[str]:
    """Look up all names and URIs, and note the results in `asked`; return the sources' labels, in their order.

    URIs need not be below an allowed prefix. A dry run asks the sources, and leaves the store as it is. Where `base` is
    None, adapters are compared with no base model. `base_path`, the base model's path or Hub id, fills the sources'
    templates. `before_fetch` is a note for the user, shown once, as the first fetch begins; none where empty.

    Raises:
        InvalidSettings: the environment has no source for a name; a source or the store cannot be made.
    """
    uris = [str(_prefix(one.uri)) for one in asked if one.uri is not None]
    # Prefixes limit the clients of a server; the user of a command may read any URI.
    settings = replace(settings, allowed_uris=(*settings.allowed_uris, *uris))
    if base is None:
        settings = replace(settings, base_match=BaseMatch.OFF)
    sources = sources_of_environment(settings)
    if len(uris) < len(asked):  # a name is among them, and no URI says where to look for the name
        require_sources(sources)
    bars = FetchBars(output, len(asked))
    events, turns = Events(bars.on_event), asyncio.Semaphore(_AT_ONCE)
    unsaid = [before_fetch] if before_fetch else []  # emptied once the note is shown
    # Show the note at the first fetch; `pop` leaves none for the next.
    events.add(lambda event: output.progress(unsaid.pop()) if unsaid and isinstance(event, FetchStarted) else None)
    search, resolver = SourceSearch(settings, events, sources), None  # no resolver: a dry run
    if not dry_run:
        resolver = AdapterResolver(settings, events, open_store(settings), sources)
        resolver.base = base
    first: dict[tuple[str, Path], AdapterResolved] = {}  # by name and directory, the facts of the first look-up

    async def end(one: LookUp) -> None:
        async with turns:
            started = time.perf_counter()
            try:
                if resolver is None:
                    await _locate(search, one, base_path, settings)
                else:
                    await _store(resolver, one, base_path, first)
            except LoRAPluginsError as error:
                one.found.error = error
            if one.found.error is not None:
                one.found.error.adapter = one.found.error.adapter or one.name
            one.elapsed_s = time.perf_counter() - started
            bars.name_ended()

    async def end_all() -> None:
        await asyncio.gather(*map(end, asked))

    with bars:
        asyncio.run(end_all())
    return [source.label for source in sources]


async def _store(
    resolver: AdapterResolver, asked: LookUp, base_path: str, first: dict[tuple[str, Path], AdapterResolved]
) -> None:
    """Bring an adapter into the store, and note the result in `asked`; `first` keeps the facts of first look-ups."""
    uri = None if asked.uri is None else asked.text
    found = asked.found = await resolver.look_up(asked.name, base_path, uri)
    # The error of an absent URI names no cause: add what lies at the place, unless an absence has its own error.
    if found.error is not None and uri is not None and found.absences and not any(one.cause for one in found.absences):
        found.error.found += ": " + "; ".join(map(str, found.absences))
    if found.resolved is None:
        return
    path = found.resolved.path
    # Only the first look-up of an adapter knows whether its bytes were fetched: a second finds the bytes in the store.
    if found.facts is not None:
        first.setdefault((asked.name, path), found.facts)
    asked.stored = Stored(found.resolved, Manifest.read(path), first[asked.name, path])
    # This process serves nothing: a lease would only keep the adapter from eviction.
    resolver.store.release(asked.name, path)


async def _locate(search: SourceSearch, asked: LookUp, base_path: str, settings: Settings) -> None:
    """Ask the sources where the adapter is, and note the answer in `asked`; the store stays as it is.

    Raises:
        LoRAPluginsError: the adapter's files would be refused.
    """
    asked.found = await search.locate(Query(AdapterName.parse(asked.name)), base_path)
    if asked.found.located is not None:
        selected = select_files(asked.found.located[1], settings)
        size_bytes = sum(file.size_bytes for file in selected.files)
        asked.would_fetch = WouldFetch(selected, size_bytes, _stored(settings, selected))


def _stored(settings: Settings, adapter: RemoteAdapter) -> Path | None:
    """Return the store's directory of this version of an adapter; None where the store does not have the version."""
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
    return last if malformed(last) is None else "unnamed"


def pull(
    output: Output,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names or URIs, or patterns in quotes for names that the sources list ('team/*')."),
    ] = None,
    *,
    file: NamesFile = None,
    base_model: Annotated[
        str, typer.Option("--base-model", help="What {base_model_name} stands for in S3_PATH_TEMPLATE.")
    ] = "",
) -> Result:
    """Bring adapters into the store, verified.

    Examples:
        pull team/sql 'other/*'
        pull s3://bucket/loras/sql
        pull --file adapters.txt --quiet
    """
    settings = Settings.from_env()
    asked = expand(wanted(names, file), lambda: names_of_environment(settings, base_model), "the sources")
    pulled = [one if isinstance(one, LoRAPluginsError) else LookUp.of(one) for one in asked]
    look_ups = [one for one in pulled if isinstance(one, LookUp) and one.found.error is None]
    look_up(output, settings, look_ups, base_model)
    return listed(one if isinstance(one, LoRAPluginsError) else _result(one) for one in pulled)


def bring(output: Output, settings: Settings, uri: str) -> Stored:
    """Fetch and verify the adapter at a URI, which need not be below an allowed prefix.

    Raises:
        AdapterNotFound: there is no adapter. LoRAPluginsError: the adapter cannot be had, or cannot be served.
    """
    asked = LookUp.of(AskedName(uri))
    if asked.found.error is None:
        look_up(output, settings, [asked], "")
    return _brought(asked)


def _result(pulled: LookUp) -> Result | LoRAPluginsError:
    try:
        stored = _brought(pulled)
    except LoRAPluginsError as error:
        return error
    found, manifest, elapsed_s = stored.adapter, stored.manifest, pulled.elapsed_s
    bytes_s = manifest.size_bytes / elapsed_s if stored.facts.fetched else None  # None: the store had the adapter
    fields = {name: getattr(found, name) for name in ("name", "source", "version")}
    fields |= {name: getattr(manifest, name) for name in ("uri", "digest", "size_bytes")}
    fields |= {"path": str(found.path), "fetched": stored.facts.fetched, "elapsed_s": elapsed_s, "bytes_s": bytes_s}
    how = "was there" if bytes_s is None else f"fetched in {elapsed_s:.2f} s ({size(bytes_s)}/s)"
    said = f"{found.name}: {size(manifest.size_bytes)} from {manifest.uri}, {how}"
    return Result(fields, [line(said), line(str(found.path))])


def _brought(pulled: LookUp) -> Stored:
    """Return the adapter that a look-up has brought into the store; raises as `bring`."""
    if pulled.found.error is not None:
        raise pulled.found.error
    if pulled.stored is None:
        absences = pulled.found.absences
        hints = [absence.hint for absence in absences if absence.hint]
        raise AdapterNotFound(
            "no such adapter: " + "; ".join(f"{absence.source}: {absence}" for absence in absences),
            expected="an adapter in one of these places",
            remedy=" ".join(hints) or "correct its spelling, or give its URI, such as hf://org/repo",
            adapter=pulled.text,
        )
    return pulled.stored
