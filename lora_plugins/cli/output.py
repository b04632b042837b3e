"""The results of commands, and how they are printed: text for people, or one JSON object; errors and bars go to stderr.

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
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from lora_plugins.cli import Exit, exit_of, worst
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import Event, FetchStarted
from lora_plugins.findings import Step
from lora_plugins.resolvers.fetch_progress import arrived_bytes
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
    shown: Sequence[Shown]
    code: Exit = Exit.OK


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
        """Print anything that rich can draw; in a pipe without the blanks at the ends of lines."""
        is_text = isinstance(what, Text)
        if self.console.is_terminal:
            self.console.print(what, soft_wrap=is_text)
            return
        # rich fills cells up with blanks, which a pipe need not carry.
        with self.console.capture() as drawn:
            self.console.print(what, soft_wrap=is_text)
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


class FetchBars(Progress):
    """A bar for each adapter that is on its way; nothing in a pipe, with JSON or where silence is wanted.

    Of several `names`, a line says how many are done. Rich asks for the bars ten times a second, and then they are
    brought up to date.
    """

    def __init__(self, output: Output, names: int) -> None:
        self._fetches: dict[TaskID, FetchStarted] = {}
        self._done, self._names, self._overall = 0, names, TaskID(-1)
        super().__init__(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=3)),
            BarColumn(bar_width=None, table_column=Column(ratio=2)),
            *(
                kind(table_column=Column(no_wrap=True))
                for kind in (DownloadColumn, TransferSpeedColumn, TimeRemainingColumn)
            ),
            console=output.errors,
            transient=True,
            expand=True,
            disable=not output.shows_progress,
        )
        self._overall = self.add_task("", total=None, visible=names > 1)

    def on_event(self, event: Event) -> None:
        """Take up a fetch that begins; a hook for events."""
        if isinstance(event, FetchStarted):
            total = sum(size_bytes for _, size_bytes in event.files)
            self._fetches[self.add_task(escape(printable(event.name)), total=total)] = event

    def name_ended(self) -> None:
        """Count a name as done, in success or failure."""
        self._done += 1

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars as they are now."""
        for bar, fetch in list(self._fetches.items()):
            arrived = arrived_bytes(fetch.directory, fetch.files)
            if arrived is None:
                del self._fetches[bar]
                self.remove_task(bar)
            else:
                self.update(bar, completed=sum(arrived.values()))
        if self._overall in self.task_ids:
            self.update(self._overall, description=f"{self._done} of {number(self._names, 'adapter')}")
        yield from super().get_renderables()


def counted(output: Output, items: Iterable[T], count: int, what: str) -> Iterable[T]:
    """Return `items` as they come, with a bar of how many of `count` there are, if several."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    is_off = not output.shows_progress or count < 2
    with Progress(*columns, console=output.errors, transient=True, disable=is_off) as progress:
        yield from progress.track(items, count, description=what)
