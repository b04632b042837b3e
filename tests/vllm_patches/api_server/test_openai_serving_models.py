"""vLLM's own table of served models over the real planner: what it resolves, loads and unloads is known to us."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList
from vllm.exceptions import VLLMNotFoundError
from vllm.lora.request import LoRARequest

from lora_plugins.api.access.policy import Policy
from lora_plugins.api.access.principals import principal_of_request
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, SourceUnavailable
from lora_plugins.events import AdapterConfirmed, SourceFailed
from lora_plugins.process import Process
from lora_plugins.resolvers.admission import LookUpsBusy
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server import openai_serving_models
from tests.lifecycle.world import Version, World
from tests.make import adapter_files, put
from tests.resolvers.test_resolver import RecordingResolver
from tests.virtual_time import runs


class EngineClient:
    """As `AsyncLLM`, with loads that go to the planner."""

    def __init__(self, lora: object | None) -> None:
        self.vllm_config = SimpleNamespace(lora_config=lora)
        self.own: list[Any] = []

    async def add_lora(self, lora_request: Any) -> bool:
        self.own.append(lora_request)
        return True


class OthersResolver:
    """Another package's: it has every name."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest:
        self.asked.append(lora_name)
        return LoRARequest(lora_name, 1, f"/others/{lora_name}")


class Models(OpenAIServingModels):
    """vLLM's methods, wrapped as they are in a server, over a made-up one."""

    def __init__(self, world: World, *, lora: object | None = "on") -> None:
        self.engine_client = EngineClient(lora)
        self.lora_requests = world.table.lora_requests
        self.lora_resolver_lock = world.server.locks
        self.lora_resolvers: list[Any] = []
        self.lora_id_counter = SimpleNamespace(inc=lambda _: next(world.server.ids))
        self.model_config = SimpleNamespace(model="/base", max_model_len=64)
        self.base_model_paths = [SimpleNamespace(name="base")]
        self.registry = SimpleNamespace(is_base_model=world.server.is_base_model)
        self.lora_plugins_lifecycle = world.lifecycle

    async def load(self, name: str, path: str, base: str | None = None, *, in_place: bool = False) -> Any:
        request = SimpleNamespace(lora_name=name, lora_path=path, load_inplace=in_place, is_3d_lora_weight=False)
        return await self.load_lora_adapter(request, base_model_name=base)

    async def unload(self, name: str) -> Any:
        return await self.unload_lora_adapter(SimpleNamespace(lora_name=name))


def served() -> tuple[World, Models]:
    world = World()
    return world, Models(world)


@pytest.fixture(autouse=True)
def patched(process: Process) -> None:
    process.settings = Settings()
    process.is_manager_patched = True
    openai_serving_models.patch()


@runs
async def test_a_resolved_name_is_served_and_known() -> None:
    world, models = served()
    world.resolver.has["sql"] = Version("aa")
    request = await models.resolve_lora("sql")
    assert await world.ask("sql") == "/store/aa"
    known = world.lifecycle.registry.get("sql")
    assert (known.request, known.version) == (request, Version("aa"))
    assert world.written == 1, "it will be there after a restart"
    assert models.engine_client.own == []


@runs
async def test_other_packages_resolvers_are_asked_after_our_sources() -> None:
    world = World()
    models, others = Models(world), OthersResolver()
    models.lora_resolvers = [others]
    world.resolver.has["sql"] = Version("aa")
    assert (await models.resolve_lora("sql")).lora_path == "/store/aa"
    assert others.asked == []
    assert (await models.resolve_lora("theirs")).lora_path == "/others/theirs"
    assert (others.asked, [it.lora_name for it in models.engine_client.own]) == (["theirs"], ["theirs"])
    known = world.lifecycle.registry.get("theirs")
    assert (known.request.lora_path, known.version) == ("/others/theirs", None)


@runs
async def test_without_sources_of_ours_no_name_counts_as_unknown(tmp_path: Path) -> None:
    resolver = RecordingResolver(tmp_path / "store")
    models = Models(World(resolver=resolver))
    models.lora_resolvers = [OthersResolver()]
    assert (await models.resolve_lora("theirs")).lora_path == "/others/theirs"
    assert resolver.emitted == []


@runs
async def test_the_base_models_name_of_a_load_outlives_swaps() -> None:
    world, models = served()
    models.base_model_paths.append(SimpleNamespace(name="base"))
    world.resolver.has["/by/hand"] = Version("aa")
    await models.load("mine", "/by/hand", "base")
    assert world.table.lora_requests["mine"].base_model_name == "base"
    world.resolver.has["/by/hand"] = Version("bb")
    await world.lifecycle.refresh("mine")
    assert world.table.lora_requests["mine"].base_model_name == "base"
    await models.load("other", "/by/hand", "unknown")
    assert world.table.lora_requests["other"].base_model_name is None, "as vLLM: not a name of this server's"


@runs
async def test_resolving_does_not_wait_for_the_load() -> None:
    world = World(delay_s=30)
    world.resolver.has["sql"] = Version("aa")
    await Models(world).resolve_lora("sql")
    assert asyncio.get_running_loop().time() < 1
    assert await world.ask("sql") == "/store/aa"
    assert asyncio.get_running_loop().time() > 30
    assert world.worker.loads.total() == 1


@runs
async def test_a_failed_load_leaves_the_table() -> None:
    world = World(broken=IncompatibleAdapter("rank 99", adapter="sql"))
    models = Models(world)
    world.resolver.has["sql"] = Version("aa")
    await models.resolve_lora("sql")
    with pytest.raises(IncompatibleAdapter, match="rank 99"):
        await world.ask("sql")
    await world.settled()
    assert world.table.lora_requests == {}, "else it would be listed, and refused at every request"
    assert world.lifecycle.registry.all() == []
    assert (world.in_workers, world.resolver.leased) == (set(), set())
    assert world.written == 2, "what is written for the next start is without it"
    world.worker.broken = None
    await models.resolve_lora("sql")
    assert await world.ask("sql") == "/store/aa"


@runs
async def test_an_unknown_name_stays_vllms_answer() -> None:
    world = World()
    answer = await Models(world).resolve_lora("nobody")
    assert answer.error.code == 404
    assert world.written == 0


@runs
async def test_requests_at_once_share_a_refused_turn() -> None:
    """VLLM's lock for the name would have each take a turn of its own, which nobody remembers."""
    world, models = served()

    async def busy(name: str, *_: Any) -> None:
        world.resolver.asked.append(name)
        await asyncio.sleep(5)
        raise LookUpsBusy("too many names")

    world.resolver.latest = busy
    answers = await asyncio.gather(*(models.resolve_lora("sql") for _ in range(40)), return_exceptions=True)
    assert {getattr(answer, "status_code", answer) for answer in answers} == {503}
    assert world.resolver.asked == ["sql"]
    assert asyncio.get_running_loop().time() < 6
    with pytest.raises(Exception, match="too many names"):
        await models.resolve_lora("sql")
    assert world.resolver.asked == ["sql", "sql"], "who comes later has a turn"


@runs
@pytest.mark.parametrize("name", ["sql", "sql@main", f"sql@{'aa' * 32}"])
async def test_a_blocked_name_is_not_resolved(name: str) -> None:
    world = World()
    world.resolver.has |= dict.fromkeys(("sql", name), Version("aa" * 32))
    await world.lifecycle.load("sql")
    await world.lifecycle.unload("sql", block=True, timeout_s=1)
    with pytest.raises(Exception, match=r"L002.*blocked"):
        await Models(world).resolve_lora(name)
    assert world.resolver.asked == ["sql"]


@runs
async def test_what_another_server_has_blocked_is_not_listed() -> None:
    world = World()
    models = listing(world)
    for name in ("sql", "chat"):
        world.resolver.has[name] = Version(name)
        await models.resolve_lora(name)
    world.resolver.store.blocks.hold("sql")
    assert await ids(models) == ["base", "chat"]


@runs
@pytest.mark.parametrize("is_for_request", [True, False])
async def test_an_operators_load_by_path_ends_a_block(monkeypatch: pytest.MonkeyPatch, is_for_request: bool) -> None:
    """What the command line names at the next start (`--lora-modules`) does not."""
    world = World()
    world.resolver.has["/path"] = Version("aa")
    await world.lifecycle.unload("sql", block=True, timeout_s=1)
    monkeypatch.setattr(openai_serving_models, "is_for_request", lambda: is_for_request)
    if is_for_request:
        with pytest.raises(Exception, match=r"L002.*blocked"):
            await Models(world).load("sql@mine", "/path")  # the block is wider
        assert world.table.lora_requests == {}
    assert "Success" in await Models(world).load("sql", "/path")
    assert ("sql" in world.lifecycle.registry.blocked) is not is_for_request


@runs
async def test_a_version_by_its_digest_is_served_beside() -> None:
    world, models = served()
    old, new = "aa" * 16, "bb" * 16
    world.resolver.has["sql"] = Version(old)
    await models.resolve_lora("sql")
    world.resolver.has["sql"] = Version(new)
    assert (await world.lifecycle.refresh("sql")).is_swap
    request = await models.resolve_lora(f"sql@{old[:8]}")
    assert request.lora_path == f"/store/{old}"
    assert await world.ask(f"sql@{old[:8]}") == f"/store/{old}"
    assert await world.ask("sql") == f"/store/{new}"
    with pytest.raises(VLLMNotFoundError, match=r"L002.*no revision or version 'cccccccc'"):
        await models.resolve_lora("sql@cccccccc")
    world.worker.broken = IncompatibleAdapter("rank 99")
    with pytest.raises(Exception, match=r"L003.*rank 99"):
        await models.resolve_lora(f"sql@{old[:9]}")


async def _one_base_model() -> ModelList:
    return ModelList(data=[ModelCard(id="base", root="/base", max_model_len=64)])


def listing(world: World) -> Models:
    models = Models(world)
    models.base_model_paths = [SimpleNamespace(name="base")]
    models.registry.show_available_models = _one_base_model
    return models


async def ids(models: Models) -> list[str]:
    return [card.id for card in (await models.show_available_models()).data]


@runs
async def test_a_version_by_its_digest_is_not_listed() -> None:
    world = World()
    models = listing(world)
    for name, digest in (("sql", "aa" * 16), ("sql@main", "bb" * 16)):
        world.resolver.has[name] = Version(digest)
        await models.resolve_lora(name)
    await models.resolve_lora(f"sql@{'aa' * 4}")
    assert await world.ask(f"sql@{'aa' * 4}") == f"/store/{'aa' * 16}"
    assert await ids(models) == ["base", "sql", "sql@main"]


@pytest.fixture
def cold(process: Process, tmp_path: Path) -> World:
    """With adapters in a directory that nobody has asked for."""
    for name in ("sql", "team/poet", "team/chat", "other/secret", "base"):
        put(tmp_path / "adapters" / name, adapter_files())
    process.settings = Settings(list_models="all", runtime_lora_updating=True, store_dir=tmp_path / "store")
    process.add_source(FilesystemSource(tmp_path / "adapters"))
    return World()


@runs
async def test_what_sources_have_is_listed_where_asked_for(process: Process, cold: World) -> None:
    models = listing(cold)
    cold.resolver.has["sql"] = Version("aa")
    await models.resolve_lora("sql")
    process.resolver.store.blocks.hold("team/chat")
    assert await ids(models) == ["base", "sql", "other/secret", "team/poet"]
    card = (await models.show_available_models()).data[-1]
    assert (card.root, card.parent, card.max_model_len) == ("team/poet", "base", 64)
    for fewer in ({"list_models": "served"}, {"runtime_lora_updating": False}):
        process.settings = replace(process.settings, **{"list_models": "all", "runtime_lora_updating": True} | fewer)
        assert await ids(models) == ["base", "sql"]


@runs
async def test_a_refused_adapter_is_left_out_until_it_is_served(process: Process, cold: World, tmp_path: Path) -> None:
    models, base = listing(cold), ["base"]
    (tmp_path / "adapters" / "team" / "poet" / "adapter_config.json").write_text("{}")
    assert isinstance((await process.resolver.look_up("team/poet", "/base")).error, InvalidAdapter)
    process.events.emit(SourceFailed("team/chat", "filesystem", SourceUnavailable("no answer")))
    assert await ids(models) == [*base, "other/secret", "sql", "team/chat"]
    process.events.emit(AdapterConfirmed("team/poet", "filesystem"))
    assert await ids(models) == [*base, "other/secret", "sql", "team/chat", "team/poet"]


@runs
async def test_what_a_key_may_not_use_is_not_listed_cold(process: Process, cold: World, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[tenants.a]\nkeys = ["one"]\nadapters = ["team/*"]\n')
    process.policy = Policy.read(policy)
    models = listing(cold)
    assert await ids(models) == ["base"]
    principal_of_request.set(process.policy.of_key("one"))
    assert await ids(models) == ["base", "team/chat", "team/poet"]


# --- vLLM's endpoints ---


@runs
async def test_a_load_by_path_is_a_version() -> None:
    world = World()
    models = listing(world)
    for step, (digest, written) in enumerate((("aa", 1), ("aa", 1), ("bb", 2))):
        world.resolver.has["/by/hand"] = Version(digest)
        assert "added successfully" in await models.load("mine", "/by/hand", in_place=bool(step))
        known = world.lifecycle.registry.get("mine")
        assert (known.version, known.request) == (Version(digest), world.table.lora_requests["mine"])
        assert await world.ask("mine") == f"/store/{digest}"
        assert world.written == written, "it will be there after a restart"
    _, card = (await models.show_available_models()).data
    assert (card.id, card.root) == ("mine", "/by/hand"), "where the operator has it"


@runs
async def test_a_load_in_place_is_a_swap() -> None:
    world, models = served()
    await models.load("mine", "/workers/hand-1")
    running = world.start("mine", 10)
    await world.settled()
    before = world.table.lora_requests["mine"].lora_int_id
    await models.load("mine", "/workers/hand-2", in_place=True)
    assert world.table.lora_requests["mine"].lora_int_id != before
    assert await world.ask("mine") == "/workers/hand-2"
    assert await running == "/workers/hand-1", "the weights that it began with"
    await world.settled()
    assert world.in_workers == {"hand-2"}
    assert world.written == 2


@runs
async def test_an_unload_frees_what_vllm_takes_out() -> None:
    """Once what runs has ended, of itself."""
    world = World(drain_timeout_s=1)
    models = Models(world)
    world.resolver.has["sql"] = Version("aa")
    await models.resolve_lora("sql")
    running = world.start("sql", 5)
    await world.settled()
    assert await models.unload("sql") == "Success: LoRA adapter 'sql' removed successfully."
    assert (running.done(), world.table.lora_requests) == (False, {})
    assert await running == "/store/aa"
    await world.settled()
    assert (world.in_workers, world.resolver.leased, world.table.lora_requests) == (set(), set(), {})
    assert world.lifecycle.registry.draining == {}
    assert world.written == 2
    assert (await models.unload("sql")).error.code == 404


@runs
async def test_loads_and_unloads_do_not_wait_for_the_disk() -> None:
    world, models = served()
    world.lifecycle.written = asyncio.Event().wait
    async with asyncio.timeout(1):
        await models.load("mine", "/by/hand")
        await models.unload("mine")
    await world.settled()
    assert (world.in_workers, world.table.lora_requests) == (set(), {})


@runs
async def test_without_lora_everything_is_vllms_own() -> None:
    world = World()

    models = Models(world, lora=None)
    del models.lora_plugins_lifecycle
    assert (await models.resolve_lora("sql")).error.code == 404
    assert (await models.unload("sql")).error.code == 404
    assert "added" in await models.load("mine", "/by/hand")
    assert "added" in await models.load("mine", "/by/hand", in_place=True)
    assert [request.lora_path for request in models.engine_client.own] == ["/by/hand"] * 2
    assert "removed" in await models.unload("mine")
    assert not hasattr(models, "lora_plugins_lifecycle")


# --- errors ---


@runs
async def test_loads_at_once_each_answer_their_own_error() -> None:
    world, models = served()

    async def refuse(request: Any, **_: Any) -> None:
        await asyncio.sleep(0.01)
        raise IncompatibleAdapter("rank 99", adapter=request.lora_name)

    world.planner.load = refuse
    errors = await asyncio.gather(*(models.load(name, "/by/hand") for name in "xyz"), return_exceptions=True)
    assert [f"'{name}'" in str(error) for name, error in zip("xyz", errors, strict=True)] == [True] * 3
    assert world.table.lora_requests == {}


@runs
async def test_an_error_that_is_not_ours_stays_vllms_answer() -> None:
    answer = await Models(World()).load("", "/by/hand")
    assert answer.error.message == "Both 'lora_name' and 'lora_path' must be provided."
