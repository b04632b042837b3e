"""Which names a server served, in a file of the store, so that the next one can serve them from its start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lora_plugins.adapter.pace import paced
from lora_plugins.log import logger
from lora_plugins.server.desired import DesiredAdapter
from lora_plugins.store.layout import Layout, key_of, replace_small

FORMAT = 1
_FIELDS = ("name", "uri", "held_digest", "is_pinned", "last_digest", "last_place")
# JSON with an entry on each line: whoever knows that need not parse all of it at once.
_FIRST_LINE = f'{{"format": {FORMAT}, "served": [\n'.encode()
_LAST_LINE = b"]}"
_PIECE = 500  # entries: a few milliseconds


class ServedFile:
    """The file of one base model; replicas that share a store share it, and the last one that writes wins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written = b""  # digest of what this process has written last

    @classmethod
    def of_store(cls, root: Path, base_path: str) -> ServedFile:
        """The file below a store's root for the served model's path or Hub id."""
        return cls(Layout(root).folder("served") / f"{key_of(base_path)}.json")

    def read(self) -> list[DesiredAdapter]:
        """What was written last; less of it or nothing, with a warning, where the file cannot be read."""
        return [adapter for piece in self.pieces() for adapter in piece]

    def pieces(self) -> Iterator[list[DesiredAdapter]]:
        """The same in pieces, each of which takes a thread a few milliseconds."""
        try:
            with self.path.open("rb") as file:
                first = file.readline()
                yield from _by_lines(file) if first == _FIRST_LINE else [_of_document(first + file.read())]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("What was served before cannot be read from %s: %s", self.path, error)

    def write(self, served: Sequence[DesiredAdapter]) -> None:
        """Put this in the place of what was written before, unless this process has written just that.

        For a thread, with pauses for others: 100,000 names take a second.

        Raises:
            OSError: it cannot be written; what was written before stays.
        """
        entries = (json.dumps({field: getattr(adapter, field) for field in _FIELDS}) for adapter in paced(served))
        text = _FIRST_LINE.decode() + ",\n".join(entries) + "\n]}\n"
        digest = hashlib.sha256(text.encode()).digest()  # without the interpreter's lock
        if digest == self._written and self.path.exists():
            return
        self._written = b""
        replace_small(self.path, text)
        self._written = digest


def _by_lines(lines: Iterable[bytes]) -> Iterator[list[DesiredAdapter]]:
    """The entries of a file whose first line was read; what stands before a broken line counts."""
    piece: list[DesiredAdapter] = []
    for line in lines:
        if (text := line.strip()) == _LAST_LINE:
            yield piece
            return
        try:
            adapter = _served_name(json.loads(text.removesuffix(b",") or b"{}"))
        except (ValueError, AttributeError):
            yield piece
            raise
        if adapter is not None:
            piece.append(adapter)
        if len(piece) == _PIECE:
            yield piece
            piece = []
    yield piece
    raise ValueError("its end is missing")


def _of_document(text: bytes) -> list[DesiredAdapter]:
    """The entries of a file that another release has written."""
    content = json.loads(text)
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}")
    return [name for one in content["served"] if (name := _served_name(one)) is not None]


def _served_name(entry: dict[str, object]) -> DesiredAdapter | None:
    name, uri, held_digest, is_pinned, last_digest, last_place = (entry.get(field) for field in _FIELDS)
    if not isinstance(name, str):
        return None
    return DesiredAdapter(
        name,
        uri if isinstance(uri, str) else None,
        held_digest if isinstance(held_digest, str) else None,
        is_pinned is True,
        last_digest=last_digest if isinstance(last_digest, str) else None,
        last_place=last_place if isinstance(last_place, str) else "",
    )
