"""What a command prints: text for people, or one JSON object; errors go to stderr, or into that object.

Names and paths in adapter files are user-supplied: what is not printable is escaped before it reaches a terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import environment

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but errors: the exit code says the rest.")]
# A pipe has no width to break lines at, unless COLUMNS gives one.
_WIDE = 10_000


class Output:
    """One command's two streams."""

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        for stream in (sys.stdout, sys.stderr):
            # A terminal that cannot show a character gets its escape, not an error.
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
        """Whether bars can be drawn."""
        return self.is_for_people and self.errors.is_terminal

    def line(self, text: str = "", style: str = "") -> None:
        """One line for people; nothing where JSON or silence was asked for."""
        if self.is_for_people:
            self.console.print(Text(printable(text), style=style), soft_wrap=True)

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
        """A table for people; `right` names the columns of numbers."""
        self.show(table(heads, rows, right))

    def show(self, what: RenderableType) -> None:
        """Anything that rich can draw, for people; without the blanks at the ends of lines in a pipe."""
        if not self.is_for_people:
            return
        if self.console.is_terminal:
            self.console.print(what)
            return
        with self.console.capture() as drawn:
            self.console.print(what)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))
        sys.stdout.flush()

    def json(self, value: Any, *, compact: bool = False) -> None:
        """The one object, where JSON was asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(value, indent=None if compact else 2) + "\n")
            sys.stdout.flush()

    def progress(self, text: str) -> None:
        """One line about what is going on, on stderr, and only for people."""
        if self.is_for_people:
            self.errors.print(Text(printable(text), style="dim"), soft_wrap=True)

    def error(self, error: dict[str, str]) -> None:
        """What went wrong."""
        if self.as_json:
            self.json({"error": error})
        else:
            self.errors.print(Text("error: ", style="bold red").append(printable(error["message"])), soft_wrap=True)

    def our_error(self, error: LoRAPluginsError) -> None:
        """What went wrong, as one of our errors."""
        self.error(error_fields(error))


def error_fields(error: LoRAPluginsError) -> dict[str, str]:
    """One of our errors as JSON has it."""
    return {"code": error.code, "kind": type(error).__name__, "message": str(error), **error.fields()}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> Table:
    """A table without lines, whose cells fold where a terminal is narrow."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in heads:
        made.add_column(head, justify="right" if head in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def printable(text: str) -> str:
    """`text` with everything escaped that would move a cursor, or that UTF-8 cannot carry."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else shutil.get_terminal_size((_WIDE, 25)).columns
    # With NO_COLOR, rich leaves out colours and keeps bold and dim, which are the same kind of codes.
    is_plain = bool(environment().get("NO_COLOR"))
    return Console(
        stderr=stderr,
        width=width,
        color_system=None if is_plain else "auto",
        no_color=is_plain or None,
        highlight=False,
        markup=False,
        emoji=False,
    )
