"""Which version a name, a place or a digest stands for, and what stays leased of it."""

from __future__ import annotations

import pytest

from lora_plugins.errors import AdapterNotFound
from lora_plugins.lifecycle.finding import find, find_newest, find_version
from tests.lifecycle.world import Version, World
from tests.virtual_time import runs

OLD, NEW = "aa" * 32, "bb" * 32


@runs
async def test_what_no_source_has_is_not_found() -> None:
    world = World()
    with pytest.raises(AdapterNotFound, match="no such adapter at any source"):
        await find(world.lifecycle.server, "sql", None)
    with pytest.raises(AdapterNotFound, match="at its source any more"):
        await find_newest(world.lifecycle.server, "sql", "/by/hand")


@runs
async def test_a_version_in_the_store_needs_no_source() -> None:
    world = World()
    world.resolver.versions[OLD] = Version(OLD)
    found = await find_version(world.lifecycle.server, "sql", None, OLD)
    assert (found.digest, world.resolver.asked, world.resolver.leased) == (OLD, [], {OLD})


@runs
async def test_another_version_at_the_place_is_released() -> None:
    world = World()
    world.resolver.has["s3://b/sql"] = Version(NEW)
    world.resolver.versions[OLD] = Version(OLD, uri="s3://b/other")
    with pytest.raises(AdapterNotFound, match=f"{NEW[:12]} at its source; expected {OLD}"):
        await find_version(world.lifecycle.server, "sql", "s3://b/sql", OLD)
    assert world.resolver.leased == set()
