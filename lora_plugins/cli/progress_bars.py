"""Progress bars on stderr: of fetches, in bytes, and of things that a command does one after the other.

Only on a terminal: in a pipe, with `--json` and with `--quiet` nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich import progress
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Column

from lora_plugins.cli.output import Output, number, printable
from lora_plugins.events import Event, FetchStarted
from lora_plugins.resolvers.fetch_progress import arrived_bytes

T = TypeVar("T")


class FetchBars(progress.Progress):
    """A bar for each adapter that is on its way; nothing in a pipe, with JSON or where silence is wanted.

    Of several `names`, a line says how many are done. Rich asks for the bars ten times a second, and then they are
    brought up to date.
    """

    def __init__(self, output: Output, names: int) -> None:
        self._fetches: dict[progress.TaskID, FetchStarted] = {}
        self._done, self._names, self._overall = 0, names, progress.TaskID(-1)
        super().__init__(
            progress.TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=3)),
            progress.BarColumn(bar_width=None, table_column=Column(ratio=2)),
            *(
                kind(table_column=Column(no_wrap=True))
                for kind in (progress.DownloadColumn, progress.TransferSpeedColumn, progress.TimeRemainingColumn)
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
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
    )
    is_off = not output.shows_progress or count < 2
    with progress.Progress(*columns, console=output.errors, transient=True, disable=is_off) as bar:
        yield from bar.track(items, count, description=what)
