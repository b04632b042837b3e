"""What is said of a fetch while it goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lora_plugins.events import Event, Events, FetchEnded, FetchGoesOn, FetchStarted
from lora_plugins.resolvers.fetch_progress import reported
from tests.virtual_time import runs


@runs
async def test_a_slow_fetch_says_again_and_again_how_far(tmp_path: Path) -> None:
    said: list[Event] = []
    started = FetchStarted("sql", "s3", str(tmp_path), (("a", 8192), ("b", 100_000)))
    async with reported(Events(said.append), started):
        assert said == [started]
        await asyncio.sleep(4)
        (tmp_path / "a").write_bytes(bytes(8192))
        await asyncio.sleep(60)
    await asyncio.sleep(100)
    assert said[1:] == [
        *(FetchGoesOn("sql", "s3", took_s, 8192, 108_192) for took_s in (5.0, 35.0)),
        FetchEnded("sql", "s3"),
    ]


@runs
async def test_a_quick_or_failed_fetch_only_ends(tmp_path: Path) -> None:
    said: list[Event] = []
    started = FetchStarted("sql", "s3", str(tmp_path), ())
    with pytest.raises(ConnectionError):
        async with reported(Events(said.append), started):
            raise ConnectionError
    assert said == [started, FetchEnded("sql", "s3")]
