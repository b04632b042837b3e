"""The names of sources for `/v1/models`: bounded, by whoever may see them, and in spite of a source that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.listed_names import MOST, ListedNames
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.source import Listing
from tests.make import adapter_files, put
from tests.virtual_time import runs


class Lists:
    """A source that lists, after a while or not at all."""

    remote = True

    def __init__(self, label: str, *names: str, delay_s: float = 0.0) -> None:
        self.label = label
        self.listed = names
        self.delay_s = delay_s
        self.asked = 0
        self.error: Exception | None = None

    async def names(self, _: str) -> Listing:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        return Listing(tuple(self.listed))


def everybody(_: str) -> bool:
    return True


def test_what_a_directory_has(tmp_path: Path) -> None:
    put(tmp_path / "team" / "sql", adapter_files())
    put(tmp_path / ".versions" / "7", adapter_files())
    listed = ListedNames([FilesystemSource(tmp_path)], 60)
    assert asyncio.run(listed.names("/base", everybody)) == ["team/sql"]


@runs
async def test_a_source_that_fails_hides_nothing(logged) -> None:
    works, fails = Lists("filesystem", "sql", "chat"), Lists("s3", "cloud")
    listed = ListedNames([works, fails], 60)
    assert await listed.names("/base", everybody) == ["chat", "cloud", "sql"]
    fails.error = SourceUnavailable("no answer")
    works.listed = ("sql",)
    for _ in range(3):
        await asyncio.sleep(61)
        assert await listed.names("/base", everybody) == ["cloud", "sql"]
    assert len([row for row in logged.records if "s3" in row.getMessage()]) == 1


@runs
async def test_a_slow_source_is_not_waited_for() -> None:
    slow = Lists("hub", "acme/poet", delay_s=30)
    listed = ListedNames([Lists("filesystem", "sql"), slow], 60)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await listed.names("/base", everybody) == ["sql"]
    assert loop.time() - began < 5
    await asyncio.sleep(31)
    assert await listed.names("/base", everybody) == ["acme/poet", "sql"]
    assert slow.asked == 1


@runs
async def test_many_callers_ask_once_and_get_what_they_may_use(logged) -> None:
    source = Lists("s3", *(f"{team}/{number:05}" for team in "ab" for number in range(5_000)))
    listed = ListedNames([source], 60)
    answers = await asyncio.gather(*(listed.names("/base", lambda name: name.startswith("b/")) for _ in range(20)))
    assert (len(answers[0]), answers[0][0], source.asked) == (MOST, "b/00000", 1)
    (cut,) = [row.getMessage() for row in logged.records if "/v1/models" in row.getMessage()]  # not at every answer
    assert f"first {MOST:,} names" in cut
    logged.clear()
    exactly = ListedNames([Lists("s3", *(f"{number:04}" for number in range(MOST)))], 60)
    assert len(await exactly.names("/base", everybody)) == MOST
    assert not logged.records
