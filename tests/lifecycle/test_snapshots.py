"""What callers name by a path, over the real store: which copy the engine is given, and whose leases go when."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, NoFreeSlot
from lora_plugins.events import Events
from lora_plugins.lifecycle import snapshots
from lora_plugins.lifecycle.snapshots import Snapshots
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.settings import Settings
from lora_plugins.store.store import Store
from tests.make import BASE, adapter_files, put


@dataclass
class Request:
    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


class TensorRequest(Request):
    pass


class Bed:
    """A client's snapshots, and a directory whose adapter changes."""

    def __init__(self, tmp_path: Path) -> None:
        self.events: list[object] = []
        self.resolver = AdapterResolver(Settings(), Events(self.events.append), Store(tmp_path / "store"))
        self.resolver.base = BASE
        self.held: set[int] = set()
        self.questions = 0  # to the engines, which ids they hold
        self.snapshots = Snapshots(self.resolver, lambda request: type(request) is Request, BASE.path, self.list_loras)
        self.directory = tmp_path / "policy"
        self.publish(1)

    async def list_loras(self) -> set[int]:
        self.questions += 1
        return self.held

    def publish(self, alpha: int, directory: Path | None = None) -> None:
        put(directory or self.directory, adapter_files(lora_alpha=alpha))

    def request(self, engine_id: int = 1, path: str | None = None, **more: Any) -> Request:
        return Request("policy", engine_id, path or str(self.directory), **more)

    async def path(self, engine_id: int = 1, path: str | None = None, **more: Any) -> str:
        return str((await self.snapshots.of(self.request(engine_id, path, **more))).lora_path)

    async def alpha(self, *args: Any, **more: Any) -> int:
        return int(json.loads((Path(await self.path(*args, **more)) / CONFIG_FILE).read_text())["lora_alpha"])

    async def add(self, fails: Exception | None = None, **more: Any) -> str:
        async with self.snapshots.adding(self.request(**more)) as taken:
            if fails is not None:
                raise fails
        return str(taken.lora_path)

    async def leased(self) -> int:
        """How many versions, once the thread has removed the leases that have ended."""
        await asyncio.sleep(0)
        await asyncio.to_thread(bool)
        store = self.resolver.store
        return sum(bool(store.leases.holders(digest)) for digest in store.layout.digests())


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test, and what it asks pytest for, with one thread for files."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def with_one_thread() -> None:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            await test(**fixtures)

        asyncio.run(with_one_thread())

    return run


@runs
async def test_an_id_stands_for_what_lay_there_first(bed: Bed) -> None:
    first = await bed.path()
    bed.publish(2)
    assert await bed.path() == first
    assert await bed.path(path="/dummy_lora_path") == first, "as SkyRL asks for what it has added"
    assert await bed.path(2) != first, "another id is read when it comes first"
    assert await bed.alpha(load_inplace=True) == 2
    assert (await bed.alpha(), await bed.alpha(path="/dummy_lora_path")) == (2, 2)


@runs
async def test_nothing_but_the_copy_is_read_later(bed: Bed) -> None:
    first = Path(await bed.path())
    for file in first.iterdir():
        assert file.stat().st_nlink == 1
    for file in bed.directory.iterdir():
        file.unlink()
    bed.directory.rmdir()
    assert Path(await bed.path()) == first
    assert (await bed.alpha(), await bed.path(2)) == (1, str(bed.directory))


@runs
async def test_another_directory_of_the_same_id_is_copied(bed: Bed) -> None:
    other = bed.directory.with_name("step-2")
    bed.publish(2, other)
    assert await bed.alpha() == 1
    assert await bed.alpha(path=str(other)) == 2
    events = len(bed.events)
    assert await bed.alpha(path=str(other)) == 2
    assert len(bed.events) == events, "no directory is looked at for a request of what is known"


@runs
async def test_the_callers_own_request_stays_as_it_is(bed: Bed) -> None:
    request = bed.request(load_inplace=True)
    found = await bed.snapshots.of(request)
    assert request == bed.request(load_inplace=True)
    assert (found.lora_name, found.lora_int_id, found.load_inplace) == ("policy", 1, True), "for the planner"


@runs
async def test_what_is_no_directory_is_left_as_it_is(bed: Bed) -> None:
    for path in ("/not/there", "no\0path", str(bed.directory / CONFIG_FILE)):
        request = bed.request(path=path)
        assert await bed.snapshots.of(request) is request
    in_store, tensors = bed.request(9, await bed.path()), TensorRequest("policy", 1, str(bed.directory))
    for request in (in_store, tensors):
        assert await bed.snapshots.of(request) is request
    assert await bed.snapshots.take(tensors) is None


@pytest.mark.parametrize("path", ["simon_lora_path", "", "not/there/at/all", "team/sql"])
@runs
async def test_an_id_that_the_engines_hold_is_asked_once(bed: Bed, path: str) -> None:
    bed.held = {1}
    request = Request("policy", 1, path)
    taken = {(await bed.snapshots.of(request)).lora_path for _ in range(3)}
    assert taken == {os.path.join("/dev/null", path)}, "no worker finds it, nor asks the Hub"
    assert (request.lora_path, bed.questions) == (path, 1)
    bed.snapshots.forget(1)
    await bed.snapshots.of(request)
    assert bed.questions == 2, "removed, and given again"


@runs
async def test_an_id_that_no_engine_holds_means_its_path(bed: Bed) -> None:
    with pytest.raises(InvalidAdapter, match="no directory here"):
        await bed.path(path="simon_lora_path")
    bed.held = {1}
    with pytest.raises(InvalidAdapter, match="no directory here"):
        await bed.path(path="simon_lora_path", load_inplace=True)
    assert bed.questions == 1
    assert await bed.alpha() == 1, "a directory says more than the id"


@runs
async def test_a_stub_means_the_copy_that_was_added(bed: Bed) -> None:
    """Whether or not an engine has evicted it since."""
    added = await bed.add()
    assert {await bed.path(path=path) for path in ("simon_lora_path", "team/sql")} == {added}
    assert bed.questions == 0
    bed.held = {1}
    renamed = await bed.snapshots.of(Request("another", 1, "team/sql"))
    assert (renamed.lora_path, bed.questions) == ("/dev/null/team/sql", 1), "the engines know what the id means now"
    assert await bed.path() == added


@runs
async def test_added_tensors_are_known_without_a_question(bed: Bed) -> None:
    async with bed.snapshots.adding(TensorRequest("policy", 1, "simon_lora_path")) as taken:
        assert taken.lora_path == "simon_lora_path"
    assert await bed.path(path="team/sql") == "/dev/null/team/sql"
    assert bed.questions == 0
    bed.held = {1}
    assert await bed.add(path="simon_lora_path") == "/dev/null/simon_lora_path"
    bed.held = set()
    with pytest.raises(InvalidAdapter, match="no directory here"):  # engines cannot load lost tensors again
        await bed.add(path="simon_lora_path")


@pytest.mark.parametrize("path", ["simon_lora_path", "team/sql"])
@runs
async def test_a_held_id_is_added_at_any_path(bed: Bed, path: str) -> None:
    """As in vLLM, which reads nothing where the engine has the id; also before a request has named the id."""
    bed.held = {1}
    assert {await bed.add(path=path) for _ in range(2)} == {f"/dev/null/{path}"}
    assert await bed.path(path=path) == f"/dev/null/{path}"
    with pytest.raises(InvalidAdapter, match="no directory here"):
        await bed.add(path="simon_lora_path", load_inplace=True)
    copy = await bed.add()
    assert await bed.add(path=path) == copy, "the copy that was added"


@runs
async def test_what_workers_have_lost_is_asked_again(bed: Bed) -> None:
    bed.held = {1}
    taken = await bed.snapshots.of(bed.request(path="simon_lora_path"))
    await bed.add(path="simon_lora_path")
    bed.snapshots.refused(taken, NoFreeSlot("full"))
    assert await bed.path(path="simon_lora_path") == taken.lora_path
    bed.held = set()
    bed.snapshots.refused(taken, AdapterNotFound("no such directory in this worker"))
    with pytest.raises(InvalidAdapter, match="no directory here"):
        await bed.path(path="simon_lora_path")


@runs
async def test_an_added_directory_of_the_workers_takes_the_copys_place(bed: Bed) -> None:
    await bed.add()
    assert await bed.add(path="/only/workers") == "/only/workers"
    assert await bed.path(path="/only/workers") == "/only/workers"
    assert await bed.leased() == 0


@runs
async def test_a_load_that_fails_changes_nothing(bed: Bed) -> None:
    first = await bed.add()
    bed.publish(2)
    with pytest.raises(NoFreeSlot):
        await bed.add(NoFreeSlot("full"))
    assert (await bed.path(), await bed.leased()) == (first, 1)
    (bed.directory / CONFIG_FILE).write_text("{")
    with pytest.raises(InvalidAdapter):
        await bed.path(load_inplace=True)
    assert (await bed.path(), await bed.leased()) == (first, 1)


@runs
async def test_two_adds_at_once_leave_the_engines_last(bed: Bed) -> None:
    engine: list[str] = []

    async def add(alpha: int, load_s: float) -> None:
        bed.publish(alpha)
        async with bed.snapshots.adding(bed.request(load_inplace=True)) as taken:
            await asyncio.sleep(load_s)
            engine.append(taken.lora_path)

    first = asyncio.create_task(add(1, 0.3))
    while not await bed.leased():
        await asyncio.sleep(0.01)
    await asyncio.gather(first, add(2, 0.0))
    assert (len(set(engine)), await bed.path()) == (2, engine[-1])


@runs
async def test_what_is_removed_while_it_is_added_is_read_again(bed: Bed) -> None:
    async with bed.snapshots.adding(bed.request()):
        bed.snapshots.forget(1)
    assert await bed.leased() == 0
    bed.publish(2)
    assert await bed.alpha() == 2


@runs
async def test_what_the_engine_refuses_is_read_again(bed: Bed) -> None:
    error = InvalidAdapter("a tensor", expected="another", remedy="mend it")
    taken = await bed.snapshots.of(bed.request())
    bed.publish(2)
    bed.snapshots.refused(taken, NoFreeSlot("full"))
    assert (await bed.leased(), await bed.alpha()) == (1, 1), "its bytes are right"
    bed.snapshots.refused(taken, error)
    assert (await bed.leased(), await bed.alpha()) == (0, 2)
    bed.publish(3)
    later = await bed.snapshots.of(bed.request(load_inplace=True))
    for _ in range(2):
        bed.snapshots.refused(later, error)
        assert (await bed.leased(), await bed.alpha()) == (1, 2), "the one before answers"


@runs
async def test_two_versions_of_an_id_are_leased_at_most(bed: Bed) -> None:
    for alpha in (1, 2, 2, 3):
        bed.publish(alpha)
        await bed.add()
    assert await bed.leased() == 2
    bed.snapshots.forget(1)
    assert await bed.leased() == 0
    for engine_id in (1, 2):
        await bed.add(engine_id=engine_id)
    bed.snapshots.forget_all()
    assert await bed.leased() == 0, "the client is gone"


@runs
async def test_requests_at_once_share_one_copy(bed: Bed) -> None:
    paths = await asyncio.gather(*(bed.path() for _ in range(20)))
    assert (len(set(paths)), await bed.leased()) == (1, 1)


@runs
async def test_who_comes_after_a_change_sees_it(bed: Bed) -> None:
    """A load that somebody has given up on goes on, and nobody who comes later gets what it has read."""
    first = asyncio.create_task(bed.path(load_inplace=True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    bed.publish(2)
    assert await bed.alpha(load_inplace=True) == 2
    while await bed.leased() > 1:
        await asyncio.sleep(0.01)


@runs
async def test_what_was_used_longest_ago_is_forgotten(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "REMEMBERED", 2)
    for engine_id in (1, 2, 1, 3):
        await bed.path(engine_id)
    bed.publish(2)
    assert [await bed.alpha(engine_id) for engine_id in (1, 3, 2)] == [1, 1, 2]
    assert await bed.leased() == 2
