"""What a fetch that failed has brought, kept for the next fetch of the same version.

`<root>/.parts/<key of the URI>.<key of the version>/` has the files as far as they came, and in `parts.json` which
ranges of them are there. Whoever fetches that version next, of any process, moves it away by one rename and goes on.
What a process that was killed had fetched is not here: nobody has said which of its ranges were written.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.store.layout import Layout, key_of, sync_directory

KEPT_S = 24 * 3600.0
_RANGES_FILE = "parts.json"

# By a file's name: where contiguous ranges of it begin and end, in bytes.
Ranges = Mapping[str, Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one version; `size_bytes` is what they take on the disk."""

    path: Path
    size_bytes: int
    kept_at: float


def place_of(layout: Layout, uri: str, version: str) -> Path:
    """Where the parts of this version are kept."""
    return layout.folder("parts") / f"{key_of(uri)}.{key_of(version)}"


def keep(place: Path, directory: Path, ranges: Ranges) -> None:
    """Keep a directory's files for a day; they are on the disk before anyone can find them.

    Raises:
        OSError: the store cannot be written.
    """
    (directory / _RANGES_FILE).write_text(json.dumps({name: list(found) for name, found in ranges.items()}))
    for name in (*ranges, _RANGES_FILE):
        descriptor = os.open(directory / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    discard(place)
    os.rename(directory, place)
    os.utime(place)
    sync_directory(place.parent)


def take(place: Path, directory: Path, sizes_bytes: Mapping[str, int]) -> Ranges:
    """Make `directory`, with the parts of this version where there are some; those of the URI's other versions go.

    The ranges of each file are in order, and inside a file of the size that `sizes_bytes` says.

    Raises:
        OSError: the store cannot be written.
    """
    for other in place.parent.glob(f"{place.name.partition('.')[0]}.*"):
        if other != place:
            discard(other)
    try:
        os.rename(place, directory)
    except FileNotFoundError:
        directory.mkdir()
        return {}
    described = directory / _RANGES_FILE
    try:
        found = json.loads(described.read_text())
        described.unlink()
        sound = {name: _sound(directory / name, size, found.get(name, ())) for name, size in sizes_bytes.items()}
        return {name: ranges for name, ranges in sound.items() if ranges}
    except (OSError, ValueError, TypeError, AttributeError):
        shutil.rmtree(directory)
        directory.mkdir()
        return {}


def _sound(file: Path, size_bytes: int, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of a file's ranges that can be right."""
    if not file.is_file() or file.stat().st_size != size_bytes:
        return []
    sound: list[tuple[int, int]] = []
    for begin, end in sorted((int(begin), int(end)) for begin, end in ranges):
        if (sound[-1][1] if sound else 0) <= begin < end <= size_bytes:
            sound.append((begin, end))
    return sound


def all_parts(layout: Layout) -> list[Parts]:
    """Everything that is kept, the oldest first."""
    found = []
    for entry in os.scandir(layout.folder("parts")):
        try:
            size_bytes = sum(file.stat().st_blocks * 512 for file in os.scandir(entry.path))
            found.append(Parts(Path(entry.path), size_bytes, entry.stat().st_mtime))
        except OSError:
            continue  # another process goes on with it, or has removed it
    return sorted(found, key=lambda parts: parts.kept_at)


def discard(path: Path) -> None:
    """Remove what is kept at a place, if anything."""
    shutil.rmtree(path, ignore_errors=True)


def discard_all(layout: Layout) -> None:
    """Remove everything that is kept."""
    for parts in all_parts(layout):
        discard(parts.path)


def sweep(layout: Layout) -> None:
    """Remove what nobody has gone on with for a day."""
    for parts in all_parts(layout):
        if time.time() - parts.kept_at > KEPT_S:
            discard(parts.path)
