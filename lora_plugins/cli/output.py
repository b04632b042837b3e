"""The result of a command, and how the result is printed: text for people, or with `--json` one JSON object.

Every command returns a `Result`; `commands.py` gives the result to `Output.show`, which prints to stdout, writes
errors to stderr, and returns the exit code. The functions `size`, `ago`, `number` and `short` put values in words.

Names and paths in adapter files are user-supplied: unprintable characters are escaped before they reach a terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lora_plugins.cli import Exit, exit_of, worst
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.findings import Step
from lora_plugins.settings import environment

T = TypeVar("T")

_NUMBERS = ("size", "took", "running", "held", "rank")  # heads of columns that end at the right
# A pipe has no width to break lines at, unless COLUMNS gives one.
_WIDE = 10_000


Shown = RenderableType | LoRAPluginsError


@dataclass(frozen=True, slots=True)
class Result:
    """A command's result.

    Attributes:
        fields: the JSON object. shown: the text for people, in order; errors go to stderr.
        code: the exit code, unless a shown error asks for a larger code.
    """

    fields: dict[str, Any]
    shown: Sequence[Shown] = ()
    code: Exit = Exit.OK


def listed(
    answers: Iterable[Result | LoRAPluginsError],
    name_key: str = "name",
    *,
    above: Sequence[Shown] = (),
    below: Sequence[Shown] = (),
    blank_between: bool = False,
    code: Exit = Exit.OK,
    **more: Any,
) -> Result:
    """Return the answers for all names as a single result, with their objects in a list: of one name too.

    An error's object has its name by `name_key`. `above` and `below` are shown around the answers. `more` fields of the
    JSON object stand before the list. The exit code is `code`, unless an answer has a worse code.
    """
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
    return Result(fields, [*above, *shown, *below], worst([code, *(one.code for one in results)]))


class Output:
    """A command's two streams."""

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        for stream in (sys.stdout, sys.stderr):
            # A terminal without a character gets the character's escape, not an error.
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="backslashreplace")
        self.console = _console(stderr=False)
        self.errors = _console(stderr=True)

    @property
    def is_for_people(self) -> bool:
        """Whether tables, lines and progress are wanted."""
        return not self.as_json and not self.quiet

    @property
    def shows_progress(self) -> bool:
        return self.is_for_people and self.errors.is_terminal

    def show(self, result: Result) -> Exit:
        """Print the result in the form asked for; return the exit code."""
        code = worst([result.code, *(exit_of(item) for item in result.shown if isinstance(item, LoRAPluginsError))])
        if self.as_json:
            self.json(result.fields)
            return code
        for item in result.shown:
            if isinstance(item, LoRAPluginsError):
                self.error(error_fields(item))
            elif not self.quiet:
                self.draw(item)
        return code

    def draw(self, what: RenderableType) -> None:
        """Print anything that rich can draw, without the blanks at the ends of lines."""
        # rich fills cells up with blanks, which a pipe need not carry.
        with self.console.capture() as drawn:
            self.console.print(what, soft_wrap=isinstance(what, Text))
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in drawn.get().split("\n")[:-1]))
        sys.stdout.flush()

    def json(self, value: Any) -> None:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
        sys.stdout.flush()

    def progress(self, text: str) -> None:
        if self.is_for_people:
            self.errors.print(line(text, "dim"), soft_wrap=True)

    def error(self, error: dict[str, str]) -> None:
        if self.as_json:
            self.json({"error": error})
        else:
            self.errors.print(Text("error: ", style="bold red").append(printable(error["message"])), soft_wrap=True)


def error_fields(error: LoRAPluginsError) -> dict[str, str]:
    return {"code": error.code, "kind": type(error).__name__, "message": str(error), **error.fields()}


def line(text: str = "", style: str = "") -> Text:
    return Text(printable(text), style=style)


def table(heads: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table without lines, whose cells fold where a terminal is narrow."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=any(heads))
    for head in heads:
        made.add_column(head, justify="right" if head in _NUMBERS else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return made


def steps_table(heads: Sequence[str], steps: Iterable[Step], styles: Mapping[str, str]) -> Table:
    """Return a table of what was checked, the verdict in its style, what was found, and below a remedy, if any."""
    rows: list[tuple[str | Text, ...]] = []
    for what, verdict, found, remedy in steps:
        rows.append((what, line(verdict, styles.get(verdict, "")), found))
        rows += [("", "", f"→ {remedy}")] if remedy else []
    return table(heads, rows)


def table_above(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Shown]:
    """Return a table and a blank line below; nothing without rows."""
    return [table(heads, rows), line()] if rows else []


def with_parameters(
    command: Callable[..., T], of: Callable[..., Any], more: Callable[..., Any], leaves_out: Sequence[str] = ()
) -> Callable[..., T]:
    """Return `command` with the name, the text and the parameters of `of`, and with the parameters of `more`.

    Typer reads a command's options from its signature. `leaves_out` names the parameters that are no options.
    """
    found = [parameter for one in (of, more) for parameter in signature(one, eval_str=True).parameters.values()]
    options = [one.replace(kind=one.KEYWORD_ONLY) for one in found if one.name not in leaves_out]
    command.__name__, command.__doc__ = of.__name__, of.__doc__
    command.__signature__ = Signature(options)  # type: ignore[attr-defined]
    return command


def printable(text: str) -> str:
    """Return `text` with escapes for characters that would move a cursor, or that UTF-8 cannot carry."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def short(digest: str | None) -> str:
    """Return the beginning of a digest, enough to tell versions apart; empty for none."""
    return (digest or "")[:12]


def size(size_bytes: float) -> str:
    """Return bytes in words, in powers of 1000 and three digits."""
    value, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        # 999.5 rounds to 1000: such a value gets the next unit.
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.3g} {unit}"


def ago(at: float | None) -> str:
    """Return how long ago a time in seconds since 1970 was; `never` for none."""
    if not at:
        return "never"
    seconds = max(0.0, time.time() - at)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else shutil.get_terminal_size((_WIDE, 25)).columns
    # With NO_COLOR, rich leaves out colours and keeps bold and dim, which are the same kind of codes.
    return Console(
        stderr=stderr,
        width=width,
        color_system=None if environment().get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )
