"""The names given to a command: as arguments, a line each in a file, or as patterns of names that sources list."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_plugins.adapter.mixture import terms_of
from lora_plugins.adapter.names import AdapterName
from lora_plugins.api.access.policy import NamePattern
from lora_plugins.cli import UsageProblem, worst
from lora_plugins.cli.output import Result, Shown, error_fields, line
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError
from lora_plugins.plugin_names import RESOLVERS
from lora_plugins.resolvers.sources.configured import sources_of
from lora_plugins.resolvers.sources.source import Listing, ListsNames, Source, place_in_order
from lora_plugins.settings import Settings, named_in_environment

NamesFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="A file with a name a line, or a name and a URI; '-' is stdin, # a comment."),
]
_WITH_URI = re.compile(r"(.*\S)\s+(\S+://\S+)")


@dataclass(frozen=True, slots=True)
class AskedName:
    """A name, and the URI beside the name, if any."""

    name: str
    uri: str | None = None


def wanted(names: Sequence[str] | None, file: Path | None) -> list[AskedName]:
    """Return all names given, each once and in order.

    Raises:
        UsageProblem: there are no names, a name is empty, or the file cannot be read.
    """
    if not all(map(str.strip, names or ())):
        raise UsageProblem("an empty name: is a variable of the shell unset?")
    found = [AskedName(name) for name in names or ()]
    if file is not None:
        found += _lines(file)
    if not found:
        raise UsageProblem("no names: give one or more, or --file" if file is None else f"--file {file}: no names")
    return list(dict.fromkeys(found))


def is_pattern(text: str) -> bool:
    """Return whether a text stands for all names that fit; a URI or a mixture does not."""
    return ("*" in text or "?" in text) and "://" not in text and terms_of(text) is None


def malformed(name: str) -> AdapterNotFound | None:
    """Return the fault in a name that no adapter can have, or None."""
    try:
        AdapterName.parse(name)
    except AdapterNotFound as error:
        return error
    return None


def expand(
    asked: Iterable[AskedName], known: Callable[[], Iterable[str]], where: str
) -> list[AskedName | LoRAPluginsError]:
    """Replace patterns by names, and a pattern that fits no name by an error; `known` is asked once."""
    found: dict[AskedName, AskedName | LoRAPluginsError] = {}
    listed: list[str] | None = None
    for one in asked:
        if one.uri is not None or not is_pattern(one.name):
            found[one] = one
            continue
        listed = list(known()) if listed is None else listed
        # A name spelt exactly like the pattern goes before the pattern.
        fits = [one.name] if one.name in listed else list(filter(NamePattern(one.name).matches, listed))
        found.update((AskedName(name), AskedName(name)) for name in fits)
        if not fits:
            found[one] = AdapterNotFound(
                "no adapter that matches",
                expected=f"one of the {len(listed)} names of {where}"
                if listed
                else f"names in {where}, which has none",
                remedy="put the pattern between quotes; '*' stands for any characters, slashes too, and '?' for one",
                adapter=one.name,
            )
    return list(found.values())


def sources_of_environment(settings: Settings) -> list[Source]:
    """Return the sources that `VLLM_PLUGINS` names, in their order.

    Raises:
        InvalidSettings: a source cannot be made.
    """
    named = filter(named_in_environment, RESOLVERS)
    found = [source for plugin in named for source in sources_of(plugin, settings)]
    return sorted(found, key=lambda item: place_in_order(item, settings.sources))


def require_sources(sources: Sequence[Source]) -> None:
    """Refuse to go on where a server with this environment would ask no source.

    Raises:
        InvalidSettings: no plugin with a source is named, or no named plugin has its own setting.
    """
    if not sources:
        raise InvalidSettings(
            "no source of adapters in this environment",
            expected="VLLM_PLUGINS with one of " + ", ".join(RESOLVERS) + ", and that one's own setting",
            remedy="set both; 'lora-plugins doctor' says what is missing",
        )


async def list_names(sources: Sequence[Source], base_model_name: str) -> list[Listing | LoRAPluginsError]:
    """Return each source's list, or the source's error."""

    async def one(source: Source) -> Listing | LoRAPluginsError:
        if not isinstance(source, ListsNames):
            return Listing((), ("this source does not list what it has",))
        try:
            return await source.names(base_model_name)
        except LoRAPluginsError as error:
            return error

    return await asyncio.gather(*map(one, sources))


def names_of_environment(settings: Settings, base_model_name: str, *, only_local: bool = False) -> list[str]:
    """Return all names in the sources' lists, each once; `only_local`: of sources on this machine.

    Raises:
        LoRAPluginsError: a source does not answer.
    """
    names: dict[str, None] = {}
    sources = [source for source in sources_of_environment(settings) if not (only_local and source.remote)]
    for listing in asyncio.run(list_names(sources, base_model_name)):
        if isinstance(listing, LoRAPluginsError):
            raise listing
        names.update(dict.fromkeys(listing.names))
    return list(names)


def listed(
    answers: Iterable[Result | LoRAPluginsError], name_key: str = "name", *, blank_between: bool = False, **more: Any
) -> Result:
    """Return the answers for all names as a single result, with their objects in a list: of one name too."""
    results = [
        Result({name_key: one.adapter, "error": error_fields(one)}, [one]) if isinstance(one, LoRAPluginsError) else one
        for one in answers
    ]
    failed = sum("error" in one.fields for one in results)
    fields = {**more, "adapters": [one.fields for one in results], "count": len(results), "failed": failed}
    shown: list[Shown] = []
    for one in results:
        shown += [line()] if blank_between and shown else []
        shown += one.shown
    return Result(fields, shown, worst(one.code for one in results))


def _lines(file: Path) -> list[AskedName]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageProblem(f"--file {file}: {getattr(error, 'strerror', None) or 'no text'}") from None
    found = []
    for row in map(str.strip, text.splitlines()):
        if row and not row.startswith("#"):
            match = _WITH_URI.fullmatch(row)
            found.append(AskedName(match[1], match[2]) if match else AskedName(row))
    return found
