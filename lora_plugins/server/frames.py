"""Messages between the API servers of one deployment: msgpack with a length of 4 bytes in front, on a Unix socket."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

Frame = dict[str, Any]

# Both ends are processes of one release, so the format has no version.
_LENGTH_BYTES = 4
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Frame)


def send(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Queue a message behind earlier messages; a closed connection is no error."""
    if not writer.is_closing():
        body = _encoder.encode(frame)
        writer.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """The next message; None where the other side has closed the connection."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        return _decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
