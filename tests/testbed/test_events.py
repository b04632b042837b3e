"""Events of a stream, whatever stands in their texts and wherever the network cuts them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from testbed.events import events, events_of

TEXTS = ["a\u2028b", "\x85", "\x1c\x0b", "é", ""]
BODY = b"".join(b"data: " + json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n\n" for text in TEXTS)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_texts_with_other_ends_of_lines_are_whole(size: int) -> None:
    body = b": comment\n\n" + BODY + b"data: [DONE]\n\n"

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), size):
            yield body[begin : begin + size]

    async def read() -> list[str]:
        return [event["text"] async for event in events(httpx.Response(200, content=pieces()))]

    assert asyncio.run(read()) == TEXTS
    assert [event["text"] for event in events_of(body)] == TEXTS
