"""Bars on stderr for what takes long: how far each file of a fetch is, all fetches together, and names done."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

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

from lora_plugins.cli.amounts import number
from lora_plugins.cli.output import Output, printable
from lora_plugins.events import Event, FetchStarted

_LOOK_S = 0.1

T = TypeVar("T")


@dataclass(slots=True)
class _Fetch:
    """A fetch under way: where its files arrive, their sizes, and their bars."""

    directory: str
    sizes: dict[str, int]
    bars: dict[str, TaskID]


class FetchBars:
    """The bars of the fetches of this process: one for each file that is on its way, and one for all."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._started: list[FetchStarted] = []
        self._fetches: list[_Fetch] = []
        self._ended_bytes = 0
        self._names = 0
        self._ended_names = 0

    def on_event(self, event: Event) -> None:
        """Take up a fetch that begins; a hook for events."""
        if isinstance(event, FetchStarted):
            self._started.append(event)

    def name_ended(self) -> None:
        """Count a name as done, whatever became of it."""
        self._ended_names += 1

    @asynccontextmanager
    async def shown(self, what: str, names: int = 1) -> AsyncIterator[None]:
        """Draw the bars inside; nothing in a pipe, or where JSON or silence was asked for.

        `what` stands before the bar for all; of several `names`, how many are done does.
        """
        if not self._output.shows_progress:
            yield
            return
        self._names = names
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=3)),
            BarColumn(bar_width=None, table_column=Column(ratio=2)),
            DownloadColumn(table_column=Column(no_wrap=True)),
            TransferSpeedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._output.errors, transient=True, expand=True) as progress:
            watching = asyncio.create_task(self._watch(progress, printable(what).replace("[", r"\[")))
            try:
                yield
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching

    async def _watch(self, progress: Progress, what: str) -> None:
        overall = None
        while True:
            await asyncio.sleep(_LOOK_S)
            description = what if self._names < 2 else f"{self._ended_names} of {number(self._names, 'adapter')}"
            if overall is None and (self._started or self._names > 1):
                overall = progress.add_task(description, total=None)
            if overall is None:
                continue
            while self._started:
                self._fetches.append(_begin(progress, self._started.pop(0)))
            done = total = self._ended_bytes
            for fetch in list(self._fetches):
                arrived = await asyncio.to_thread(arrived_bytes, fetch.directory, fetch.sizes)
                size_bytes = sum(fetch.sizes.values())
                total += size_bytes
                if arrived is None:
                    self._fetches.remove(fetch)
                    self._ended_bytes += size_bytes
                    done += size_bytes
                    for bar in fetch.bars.values():
                        progress.remove_task(bar)
                    continue
                done += sum(arrived.values())
                for name, bar in fetch.bars.items():
                    progress.update(bar, completed=arrived[name])
            progress.update(overall, description=description, completed=done, total=total or None)


def _begin(progress: Progress, event: FetchStarted) -> _Fetch:
    label = printable(event.name).replace("[", r"\[")
    bars = {name: progress.add_task(f"  {label} {name}", total=size_bytes) for name, size_bytes in event.files}
    return _Fetch(event.directory, dict(event.files), bars)


def arrived_bytes(directory: str, sizes: dict[str, int]) -> dict[str, int] | None:
    """Bytes on disk of each file that is on its way into `directory`; None once that is gone.

    Blocks are counted, not lengths: ranges arrive in any order in a file that has its full length from the start.
    What lies in no file of these names is what a library has of the largest that is not there yet.
    """
    on_disk = dict.fromkeys(sizes, 0)
    elsewhere = 0
    if not os.path.isdir(directory):
        return None
    for folder, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):
                size_bytes = os.stat(os.path.join(folder, file)).st_blocks * 512
                if folder == directory and file in sizes:
                    on_disk[file] = min(sizes[file], size_bytes)
                else:
                    elsewhere += size_bytes
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if not on_disk[name]:
            on_disk[name] = min(sizes[name], elsewhere)
            elsewhere -= on_disk[name]
    return on_disk


def counted(output: Output, items: Iterable[T], count: int, what: str) -> Iterator[T]:
    """`items` as they come, with a bar of how many of `count` there are, where there are several."""
    if not output.shows_progress or count < 2:
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    with Progress(*columns, console=output.errors, transient=True) as progress:
        yield from progress.track(items, count, description=what)
