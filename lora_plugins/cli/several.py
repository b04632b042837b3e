"""Several names for one command: as arguments, as patterns, or a line each in a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_plugins.api.access.name_patterns import NamePattern
from lora_plugins.cli.exits import Exit, UsageProblem, exit_of
from lora_plugins.cli.output import Output
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError

NamesFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="A file with a name a line, or a name and a URI; '-' is stdin, # a comment."),
]
_WITH_URI = re.compile(r"(.*\S)\s+(\S+://\S+)")


@dataclass(frozen=True, slots=True)
class AskedName:
    """One name, and the URI beside it where there is one."""

    name: str
    uri: str | None = None


def wanted(names: Sequence[str] | None, file: Path | None) -> list[AskedName]:
    """All that is asked for, each once and in its order.

    Raises:
        UsageProblem: nothing, or a file that cannot be read.
    """
    found = [AskedName(name) for name in names or ()]
    if file is not None:
        found += _lines(file)
    if not found:
        raise UsageProblem("no names: give one or more, or --file" if file is None else f"--file {file}: no names")
    return list(dict.fromkeys(found))


def is_several(names: Sequence[str] | None, file: Path | None) -> bool:
    """Whether more than one answer is to be expected: JSON is a list then."""
    return file is not None or len(names or ()) != 1 or is_pattern((names or [""])[0])


def is_pattern(text: str) -> bool:
    """Whether this stands for all names that fit it; URIs do not."""
    return ("*" in text or "?" in text) and "://" not in text


def matching(pattern: str, known: Iterable[str], where: str) -> list[str]:
    """The known names that fit; one that is spelt just so, if there is one.

    Raises:
        AdapterNotFound: none does.
    """
    listed = list(known)
    if pattern in listed:
        return [pattern]
    fits = NamePattern(pattern)
    found = [name for name in listed if fits.matches(name)]
    if not found:
        raise AdapterNotFound(
            "no adapter that matches",
            expected=f"one of the {len(listed)} names of {where}" if listed else f"names in {where}, which has none",
            remedy="put the pattern between quotes; '*' stands for any characters, slashes too, and '?' for one",
            adapter=pattern,
        )
    return found


def expand(
    asked: Iterable[AskedName], known: Callable[[], Iterable[str]], where: str
) -> list[AskedName | LoRAPluginsError]:
    """Names in the place of patterns, and an error in the place of a pattern that fits none; `known` is asked once."""
    found: dict[AskedName, LoRAPluginsError | None] = {}
    listed: list[str] | None = None
    for one in asked:
        if one.uri is not None or not is_pattern(one.name):
            found.setdefault(one)
            continue
        listed = list(known()) if listed is None else listed
        try:
            found.update(dict.fromkeys(map(AskedName, matching(one.name, listed, where))))
        except AdapterNotFound as error:
            found[one] = error
    return [one if error is None else error for one, error in found.items()]


def end_of_several(output: Output, answers: Sequence[dict[str, Any]], codes: Iterable[Exit], **more: Any) -> Exit:
    """Print the answers of all names as JSON; the exit code is the largest of all."""
    failed = sum("error" in answer for answer in answers)
    output.json({**more, "adapters": list(answers), "count": len(answers), "failed": failed})
    return max(codes, default=Exit.OK)


def failure(output: Output, error: LoRAPluginsError) -> Exit:
    """Say what went wrong with one of several names, and go on."""
    if not output.as_json:
        output.our_error(error)
    return exit_of(error)


def _lines(file: Path) -> list[AskedName]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, ValueError) as error:
        raise UsageProblem(f"--file {file}: {getattr(error, 'strerror', None) or 'no text'}") from None
    found = []
    for line in map(str.strip, text.splitlines()):
        if line and not line.startswith("#"):
            match = _WITH_URI.fullmatch(line)
            found.append(AskedName(match[1], match[2]) if match else AskedName(line))
    return found
