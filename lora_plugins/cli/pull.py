"""`pull`: bring adapters into the store, as a server would at the first request for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_plugins.absence import Absence
from lora_plugins.adapter.names import AdapterName
from lora_plugins.cli.amounts import size
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Json, Output, Quiet, error_fields
from lora_plugins.cli.progress import FetchBars
from lora_plugins.cli.several import AskedName, NamesFile, end_of_several, expand, failure, is_several, wanted
from lora_plugins.cli.sources import names_of_environment, require_sources, resolver_of_environment
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.events import AdapterUnknown, Event
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.uri import SourceUri
from lora_plugins.resolvers.versions import ResolvedAdapter
from lora_plugins.settings import Settings
from lora_plugins.store.manifest import Manifest

_AT_ONCE = 8  # of which the resolver fetches four


def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names or URIs, or patterns in quotes for names that the sources list ('team/*')."),
    ] = None,
    *,
    file: NamesFile = None,
    base_model: Annotated[
        str, typer.Option("--base-model", help="What {base_model_name} stands for in S3_PATH_TEMPLATE.")
    ] = "",
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Bring adapters into the store, verified."""
    output, settings = Output(as_json=as_json, quiet=quiet), Settings.from_env()
    asked = expand(wanted(names, file), lambda: names_of_environment(settings, base_model), "the sources")
    done = bring_all(output, settings, asked, base_model)
    if not is_several(names, file):
        (one,) = done
        if isinstance(one, LoRAPluginsError):
            raise one
        output.json(_answer(one))
        _show(output, one)
        return Exit.OK
    codes = []
    for one in done:
        if isinstance(one, LoRAPluginsError):
            codes.append(failure(output, one))
        else:
            _show(output, one)
    answers = [
        {"name": one.adapter, "error": error_fields(one)} if isinstance(one, LoRAPluginsError) else _answer(one)
        for one in done
    ]
    return end_of_several(output, answers, codes)


@dataclass(frozen=True, slots=True)
class Pulled:
    """What is now in the store, whether it had to be fetched, and how long that took."""

    adapter: ResolvedAdapter
    manifest: Manifest
    fetched: bool
    elapsed_s: float


def bring(output: Output, settings: Settings, text: str, base_path: str = "") -> Pulled:
    """Fetch and verify the adapter of a name, or the one at a URI, which need not be among the allowed ones.

    Raises:
        AdapterNotFound: there is none.
        LoRAPluginsError: it cannot be had, or is not one that can be served.
    """
    (found,) = bring_all(output, settings, [AskedName(text)], base_path)
    if isinstance(found, LoRAPluginsError):
        raise found
    return found


def bring_all(
    output: Output, settings: Settings, asked: Sequence[AskedName | LoRAPluginsError], base_path: str = ""
) -> list[Pulled | LoRAPluginsError]:
    """As `bring`, for several at once, with the error in the place of one that cannot be had.

    Raises:
        InvalidSettings: the environment has no source, or one that cannot be made.
    """
    places = [one if isinstance(one, LoRAPluginsError) else _place(one) for one in asked]
    uris = [place.uri for place in places if isinstance(place, _Place) and place.uri is not None]
    settings = replace(settings, allowed_uris=(*settings.allowed_uris, *(str(_prefix(uri)) for uri in uris)))
    bars = FetchBars(output)
    absences: dict[str, tuple[Absence, ...]] = {}

    def on_event(event: Event) -> None:
        bars.on_event(event)
        if isinstance(event, AdapterUnknown):
            absences[event.name] = event.absences

    resolver = resolver_of_environment(settings, hook=on_event)
    if any(isinstance(place, _Place) and place.uri is None for place in places):
        require_sources(resolver.sources)
    before = frozenset(resolver.store.layout.digests())
    return asyncio.run(_bring_all(resolver, bars, places, before, base_path, absences=absences))


@dataclass(frozen=True, slots=True)
class _Place:
    """What to ask for: a name, or a URI and the name that it has in messages."""

    text: str
    name: str
    uri: SourceUri | None


def _place(one: AskedName) -> _Place | LoRAPluginsError:
    text = one.uri or one.name
    try:
        if "://" not in text:
            return _Place(text, str(AdapterName.parse(text)), None)
        uri = SourceUri.parse(text)
        return _Place(text, _name_of(uri) if one.uri is None else str(AdapterName.parse(one.name)), uri)
    except LoRAPluginsError as error:
        if "://" not in one.name:  # what is wrong with a URI may be a password in it
            error.adapter = error.adapter or one.name
        error.remedy = _as_uri(text) or error.remedy
        return error


def _as_uri(text: str) -> str:
    """What to do about a path in the place of a name; empty for what is none."""
    is_path = text.startswith(("/", "./", "../", "~/")) and "://" not in text
    return f"for a directory of this machine use {Path(text).expanduser().absolute().as_uri()}" if is_path else ""


async def _bring_all(
    resolver: AdapterResolver,
    bars: FetchBars,
    places: Sequence[_Place | LoRAPluginsError],
    before: frozenset[str],
    base_path: str,
    *,
    absences: Mapping[str, Sequence[Absence]],
) -> list[Pulled | LoRAPluginsError]:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(place: _Place | LoRAPluginsError) -> Pulled | LoRAPluginsError:
        if isinstance(place, LoRAPluginsError):
            bars.name_ended()
            return place
        async with turns:
            started = time.perf_counter()
            try:
                found = await _resolve(resolver, place, base_path, absences)
                elapsed_s = time.perf_counter() - started
                pulled = Pulled(found, Manifest.read(found.path), found.digest not in before, elapsed_s)
                resolver.store.release(found.name, found.path)
                return pulled
            except LoRAPluginsError as error:
                error.adapter = error.adapter or place.name
                return error
            finally:
                bars.name_ended()

    what = places[0].text if len(places) == 1 and isinstance(places[0], _Place) else ""
    async with bars.shown(what, len(places)):
        return await asyncio.gather(*map(one, places))


async def _resolve(
    resolver: AdapterResolver, place: _Place, base_path: str, absences: Mapping[str, Sequence[Absence]]
) -> ResolvedAdapter:
    if place.uri is not None:
        try:
            return await resolver.resolve_uri(place.name, place.text, base_path)
        except AdapterNotFound as error:
            if said := absences.get(place.name):  # else there is something, which the error names
                error.found += ": " + "; ".join(map(str, said))
            raise
    found = await resolver.resolve(place.text, base_path)
    if found is None:
        said = absences.get(place.name, ())
        hints = [absence.hint for absence in said if absence.hint]
        raise AdapterNotFound(
            "no such adapter: " + "; ".join(f"{absence.source}: {absence}" for absence in said),
            expected="an adapter in one of these places",
            remedy=" ".join(hints) or "correct its spelling, or give its URI, such as hf://org/repo",
            adapter=place.text,
        )
    return found


def _answer(pulled: Pulled) -> dict[str, Any]:
    found, manifest = pulled.adapter, pulled.manifest
    return {
        "name": found.name,
        "source": found.source,
        "uri": manifest.uri,
        "version": found.version,
        "digest": manifest.digest,
        "path": str(found.path),
        "size_bytes": manifest.size_bytes,
        "fetched": pulled.fetched,
        "elapsed_s": pulled.elapsed_s,
        "bytes_s": manifest.size_bytes / pulled.elapsed_s if pulled.fetched else None,
    }


def _show(output: Output, pulled: Pulled) -> None:
    found, manifest, elapsed_s = pulled.adapter, pulled.manifest, pulled.elapsed_s
    speed = size(manifest.size_bytes / elapsed_s)
    how = f"fetched in {elapsed_s:.2f} s ({speed}/s)" if pulled.fetched else "was there"
    output.line(f"{found.name}: {size(manifest.size_bytes)} from {manifest.uri}, {how}")
    output.line(str(found.path))


def _prefix(uri: SourceUri) -> SourceUri:
    """What is allowed by naming `uri`: its directory, or on the Hub its repository."""
    return SourceUri(uri.scheme, uri.authority, uri.segments[:1] if uri.scheme == "hf" else uri.segments[:-1])


def _name_of(uri: SourceUri) -> str:
    """A name for messages: the last part of the URI, where that is one."""
    last = uri.segments[-1] if uri.segments else ""
    try:
        return str(AdapterName.parse(last))
    except AdapterNotFound:
        return "unnamed"
