"""The adapter names given to a command: as arguments, one a line in a file, or as patterns such as `team/*`.

Runs in the command's process, before anything is asked of a source, a store or a server. In: the arguments, and for a
pattern the names that could be meant. Out: `AskedName` objects, each name once and in order, and an error for a pattern
without a match.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lora_plugins.adapter.mixture import terms_of
from lora_plugins.adapter.names import AdapterName
from lora_plugins.api.access.policy import NamePattern
from lora_plugins.cli import UsageProblem
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError

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


Asked = AskedName | LoRAPluginsError  # a name, or the error of a pattern that no name fits


def wanted(names: Sequence[str] | None, file: Path | None) -> list[AskedName]:
    """Return all names given, in order; equal entries (of name and URI) once.

    Raises:
        UsageProblem: there are no names, a name is empty, or the file cannot be read.
    """
    if not all(map(str.strip, names or ())):
        raise UsageProblem("an empty name: is a variable of the shell unset?")
    found = [AskedName(name) for name in names or ()]
    if file is not None:
        found += _names_in(file)
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


def expand(asked: Iterable[AskedName], known: Callable[[], Iterable[str]], where: str) -> list[Asked]:
    """Replace patterns by names, and a pattern that fits no name by an error; `known` is asked once."""
    found: dict[AskedName, Asked] = {}
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


def _names_in(file: Path) -> list[AskedName]:
    rows = [row.strip() for row in lines_of(file, "--file") if not row.lstrip().startswith("#")]
    matches = [(row, _WITH_URI.fullmatch(row)) for row in rows]
    return [AskedName(match[1], match[2]) if match else AskedName(row) for row, match in matches]


def lines_of(file: Path, option: str) -> list[str]:
    """Return the lines of the file that an option names, without empty lines; `-` is stdin.

    Raises:
        UsageProblem: the file cannot be read, or has no lines.
    """
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageProblem(f"{option} {file}: {getattr(error, 'strerror', None) or 'no text'}") from None
    if not text.strip():
        raise UsageProblem(f"{option} {file}: nothing in it")
    return [row for row in text.splitlines() if row.strip()]
