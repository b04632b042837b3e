"""Bars on stderr for long work: how far each file of a fetch is, all fetches together, and names done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich.console import RenderableType
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
from rich.table import Column

from lora_plugins.cli.output import Output, number, printable
from lora_plugins.events import Event, FetchStarted
from lora_plugins.resolvers.fetch_progress import arrived_bytes

T = TypeVar("T")


class FetchBars(Progress):
    """A bar for each file that is on its way, and one for all; nothing in a pipe, with JSON or where silence is wanted.

    `what` stands before the bar for all; of several `names`, how many are done does. Rich asks for the bars ten times a
    second, and then they are brought up to date.
    """

    def __init__(self, output: Output, what: str, names: int) -> None:
        self._what, self._names = escape(printable(what)), names
        self._fetches: list[tuple[FetchStarted, dict[str, TaskID]]] = []
        self._overall: TaskID | None = None
        self._ended_bytes = self._ended_names = 0
        super().__init__(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=3)),
            BarColumn(bar_width=None, table_column=Column(ratio=2)),
            DownloadColumn(table_column=Column(no_wrap=True)),
            TransferSpeedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            console=output.errors,
            transient=True,
            expand=True,
            disable=not output.shows_progress,
        )
        if names > 1:
            self._overall = self.add_task("", total=None)

    def on_event(self, event: Event) -> None:
        """Take up a fetch that begins; a hook for events."""
        if isinstance(event, FetchStarted):
            if self._overall is None:
                self._overall = self.add_task(self._what, total=None)
            label = escape(printable(event.name))
            bars = {name: self.add_task(f"  {label} {name}", total=size_bytes) for name, size_bytes in event.files}
            self._fetches.append((event, bars))

    def name_ended(self) -> None:
        """Count a name as done, in success or failure."""
        self._ended_names += 1

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars as they are now."""
        done = total = self._ended_bytes
        for fetch, bars in list(self._fetches):
            size_bytes = sum(size_bytes for _, size_bytes in fetch.files)
            total += size_bytes
            arrived = arrived_bytes(fetch.directory, fetch.files)
            if arrived is None:
                self._fetches.remove((fetch, bars))
                self._ended_bytes += size_bytes
                done += size_bytes
                for bar in bars.values():
                    self.remove_task(bar)
                continue
            done += sum(arrived.values())
            for name, bar in bars.items():
                self.update(bar, completed=arrived[name])
        text = self._what if self._names < 2 else f"{self._ended_names} of {number(self._names, 'adapter')}"
        if self._overall is not None:
            self.update(self._overall, description=text, completed=done, total=total or None)
        yield from super().get_renderables()


def counted(output: Output, items: Iterable[T], count: int, what: str) -> Iterable[T]:
    """Return `items` as they come, with a bar of how many of `count` there are, if several."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    is_off = not output.shows_progress or count < 2
    with Progress(*columns, console=output.errors, transient=True, disable=is_off) as progress:
        yield from progress.track(items, count, description=what)
