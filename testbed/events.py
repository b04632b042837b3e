"""The events of a streamed answer, as JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import httpx

_BEGIN = b"data: {"


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield each event as it comes.

    Lines end at LF alone: `aiter_lines`, as `str.splitlines`, also ends lines at U+2028 and the like, which stand in
    texts that random weights make.
    """
    left = b""
    async for piece in answer.aiter_bytes():
        *lines, left = (left + piece).split(b"\n")
        for event in _events(lines):
            yield event
    for event in _events([left]):
        yield event


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a whole answer."""
    return list(_events(body.split(b"\n")))


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    return (json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(_BEGIN))
