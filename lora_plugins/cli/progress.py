"""How far the fetches of this process are, read off the store's own folder of what is on its way in."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from lora_plugins.cli.output import Output, printable
from lora_plugins.store.store import Store

_LOOK_S = 0.1

T = TypeVar("T")


@asynccontextmanager
async def shown_progress(output: Output, store: Store, name: str) -> AsyncIterator[None]:
    """Draw a bar on stderr while an adapter arrives inside; nothing in a pipe or where JSON was asked for."""
    if not output.shows_progress:
        yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.errors, transient=True) as progress:
        watching = asyncio.create_task(_watch(progress, store, name))
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def _watch(progress: Progress, store: Store, name: str) -> None:
    task = None
    while True:
        await asyncio.sleep(_LOOK_S)
        arriving = await asyncio.to_thread(arrived, store)
        if arriving is None:
            continue
        done, total = arriving
        if task is None:
            task = progress.add_task(printable(name).replace("[", r"\["), total=total)
        progress.update(task, completed=done, total=total)


def arrived(store: Store) -> tuple[int, int] | None:
    """Bytes on disk, and bytes in all, of what this process fetches; None where it fetches nothing.

    Blocks are counted, not lengths: ranges arrive in any order in a file that has its full length from the start.
    """
    mine = store.processes.me()
    with contextlib.suppress(OSError):
        downloads = [item for item in store.layout.temporaries() if item.process == mine and item.needed_bytes]
        done = sum(min(item.needed_bytes, _on_disk(item.path)) for item in downloads)
        return (done, sum(item.needed_bytes for item in downloads)) if downloads else None
    return None


def _on_disk(directory: Path) -> int:
    blocks = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):
                blocks += os.stat(os.path.join(folder, file)).st_blocks
    return blocks * 512


def counted(output: Output, items: Iterable[T], count: int, what: str) -> Iterator[T]:
    """`items` as they come, with a bar of how many of `count` there are, where there are several."""
    if not output.shows_progress or count < 2:
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    with Progress(*columns, console=output.errors, transient=True) as progress:
        yield from progress.track(items, count, description=what)
