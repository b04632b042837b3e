"""The one resolver of a process: its answers as vLLM takes them, and what it learns when vLLM begins to serve."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lora_plugins.adapter.names import adapter_id
from lora_plugins.api.access.policy import Policy
from lora_plugins.api.access.principals import principal_of_request
from lora_plugins.errors import InvalidSettings
from lora_plugins.process import Process, this_process
from lora_plugins.resolvers.single_flight import NameLocks
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server import lora_resolver, openai_serving_models
from lora_plugins.vllm_patches.api_server.lora_resolver import LoRAPluginsResolver, describe_base
from lora_plugins.vllm_patches.installation import install_resolver
from tests.make import BASE, adapter_files, pair, put


def served(lora_config: object) -> SimpleNamespace:
    """What `describe_base` reads off vLLM's OpenAIServingModels."""
    return SimpleNamespace(
        engine_client=SimpleNamespace(vllm_config=SimpleNamespace(lora_config=lora_config)),
        model_config=SimpleNamespace(model="org/tiny", get_vocab_size=lambda: 32),
        base_model_paths=[SimpleNamespace(name="tiny"), SimpleNamespace(name="tiny-2")],
    )


@pytest.fixture
def resolver(process, tmp_path):
    (tmp_path / "root").mkdir()
    process.settings = Settings(store_dir=tmp_path / "store")
    process.add_source(FilesystemSource(tmp_path / "root"))
    process.resolver.base = BASE
    return LoRAPluginsResolver(process)


def resolve(resolver, name):
    return asyncio.run(resolver.resolve_lora(BASE.path, name))


def test_a_found_adapter_becomes_vllms_request(resolver, tmp_path):
    put(tmp_path / "root" / "team" / "sql", adapter_files())
    request = resolve(resolver, "team/sql")
    assert type(request).__name__ == "LoRARequest"
    assert request.lora_name == "team/sql"
    assert Path(request.lora_path).parent == tmp_path / "store"
    assert (request.lora_int_id, request.base_model_name) == (adapter_id("team/sql"), "tiny")
    resolver.process.resolver.base = None
    assert resolve(resolver, "team/sql").base_model_name is None, "before the model is served"


def test_a_request_says_whether_experts_are_stacked(resolver, tmp_path):
    """vLLM converts them by it where it takes both formats; it does not look."""
    block = "model.layers.0.mlp.experts"
    stacked = pair(block, 8, 6, 8) | pair(f"{block}.base_layer", 8, 8, 12)
    one_by_one = pair(f"{block}.0.down_proj", 4, 6, 8)
    resolver.process.resolver.base = None
    for name, tensors in (("stacked", stacked), ("one-by-one", one_by_one)):
        put(tmp_path / "root" / name, adapter_files(tensors, base_model_name_or_path=BASE.path))
        assert resolve(resolver, name).is_3d_lora_weight is (name == "stacked")


def test_an_unknown_adapter_is_none(resolver):
    assert resolve(resolver, "sql") is None
    assert resolve(resolver, "../root") is None


def test_a_broken_adapter_is_vllms_400_with_our_text(resolver, tmp_path):
    from vllm.exceptions import VLLMClientError

    put(tmp_path / "root" / "sql", {**adapter_files(), "adapter_config.json": b"{"})
    with pytest.raises(VLLMClientError, match=r"\[L005\] adapter 'sql', file 'adapter_config.json'") as caught:
        resolve(resolver, "sql")
    assert caught.value.__cause__ is None  # the refusal has been logged; vLLM would log its traceback again


@pytest.fixture
def start_serving(resolver):
    """A function that makes vLLM's own OpenAIServingModels, after our resolver has been registered."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    resolver.process.is_resolver_registered = True
    openai_serving_models.patch()

    def start(lora_config: object):
        like = served(lora_config)
        like.engine_client.model_config = like.model_config
        like.engine_client.renderer, like.engine_client.input_processor = SimpleNamespace(tokenizer=None), None
        return OpenAIServingModels(like.engine_client, like.base_model_paths, lora_modules=None)

    return start


def test_startup_reads_the_base_model_and_logs_the_sources(resolver, start_serving, logged):
    resolver.process.settings = Settings(runtime_lora_updating=True)
    models = start_serving(SimpleNamespace(max_lora_rank=64))
    assert [path.name for path in models.base_model_paths] == ["tiny", "tiny-2"]
    assert resolver.process.resolver.base.served_names == ("tiny", "tiny-2")
    (line,) = [record.getMessage() for record in logged.records if record.levelname == "INFO"]
    for part in ("lora-plugins", str(resolver.process.resolver.sources[0]), "compatible", "largest rank 64"):
        assert part in line
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in logged.text
    assert "--enable-lora" not in logged.text


def test_startup_warns_where_no_adapter_can_be_served(start_serving, logged):
    models = start_serving(None)
    warnings = [record.getMessage() for record in logged.records if record.levelname == "WARNING"]
    assert any("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in text for text in warnings)
    assert any("--enable-lora" in text for text in warnings)
    assert "largest rank unknown" in logged.text
    assert isinstance(models.lora_resolver_lock, NameLocks)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (".hidden/sql", "'.hidden', led by '.'"),
        ("team/-sql", "'-sql', led by '-'"),
        ("user@corp.com/sql", "no revision 'corp.com/sql' of an adapter 'user'"),
        ("sql@2070c155", "no revision or version '2070c155' of an adapter 'sql'"),
    ],
)
def test_a_404_says_why_a_name_is_none(start_serving, resolver, name, says):
    from vllm.exceptions import VLLMNotFoundError

    models = start_serving(SimpleNamespace(max_lora_rank=64))
    models.lora_resolvers = [resolver]
    with pytest.raises(VLLMNotFoundError, match=r"\[L002\]") as caught:
        asyncio.run(models.resolve_lora(name))
    assert f"adapter '{name}'" in str(caught.value)
    assert says in str(caught.value)
    ordinary = asyncio.run(models.resolve_lora("nobody/has-this"))
    assert ordinary.error.message == "LoRA adapter nobody/has-this does not exist"


@pytest.mark.parametrize("right", ["adapters", "pushes"])
def test_a_misspelt_name_meets_near_ones_that_may_be_used(start_serving, resolver, monkeypatch, right):
    from vllm.exceptions import VLLMNotFoundError

    models = start_serving(SimpleNamespace(max_lora_rank=64))
    models.lora_resolvers = [resolver]
    models.lora_requests = dict.fromkeys(("mine/sql", "theirs/sql", "mine/sql@v1", "gone/sql"))
    rights = {"adapters": [], right: ["mine/*", "gone/*"]}
    policy = Policy.parse('[tenants.me]\nkeys = ["mine"]\n' + "\n".join(f"{it} = {rights[it]}" for it in rights))
    monkeypatch.setattr(this_process(), "policy", policy)
    is_pusher = right == "pushes"  # as the admin API's own routes have it for the time of a call

    async def resolved(name):
        principal_of_request.set(replace(policy.of_key("mine"), is_admin=is_pusher, is_pusher=is_pusher))
        return await models.resolve_lora(name)

    this_process().resolver.store.blocks.hold("gone/sql")
    with pytest.raises(VLLMNotFoundError, match="a name like 'mine/sql'"):
        asyncio.run(resolved("mine/sqll"))
    for name in ("theirs/sqll", "gone/sqll"):
        assert asyncio.run(resolved(name)).error.message == f"LoRA adapter {name} does not exist"


def test_another_resolver_may_have_other_names(start_serving, resolver):
    async def resolve_lora(*_):
        return SimpleNamespace()

    models = start_serving(SimpleNamespace(max_lora_rank=64))
    models.lora_resolvers = [resolver, SimpleNamespace(resolve_lora=resolve_lora)]
    models.engine_client.add_lora = resolve_lora
    assert asyncio.run(models.resolve_lora(".hidden")) is models.lora_requests[".hidden"]


def test_startup_fails_with_a_store_that_cannot_be_made(start_serving, resolver, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    resolver.process.settings = Settings(store_dir=tmp_path / "file" / "store")
    del resolver.process.resolver  # not yet made
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_STORE_DIR"):
        start_serving(None)


# --- what the process has, and when


def test_nothing_is_made_before_the_first_use(tmp_path):
    before = threading.active_count()
    process = Process(Settings(store_dir=tmp_path / "store"), [FilesystemSource(tmp_path)])
    LoRAPluginsResolver(process)
    assert (threading.active_count(), (tmp_path / "store").exists()) == (before, False)
    assert not process.has_opened_resolver
    assert process.resolver is process.resolver
    assert process.has_opened_resolver
    assert (tmp_path / "store").is_dir()


def test_a_source_added_twice_is_asked_once(tmp_path):
    process = Process(Settings(store_dir=tmp_path / "store"))
    for _ in range(2):
        process.add_source(FilesystemSource(tmp_path))
    assert [source.label for source in process.resolver.sources] == ["filesystem"]


@pytest.fixture
def registered(monkeypatch):
    from vllm.lora.resolver import LoRAResolverRegistry

    registered = []
    monkeypatch.setattr(LoRAResolverRegistry, "register_resolver", lambda *named: registered.append(named))
    return registered


def test_uris_need_no_source_and_workers_know_them(tmp_path, registered):
    uri = (tmp_path / "adapters").as_uri()
    put(tmp_path / "adapters" / "sql", adapter_files())
    process = Process(Settings(store_dir=tmp_path / "store", allowed_uris=(uri,)))
    assert process.resolver_of_worker().sources == [], "for what was loaded by a path"
    nowhere = Process(Settings(store_dir=tmp_path / "adapters" / "sql" / "adapter_config.json"))
    assert nowhere.resolver_of_worker() is None
    for _ in range(2):
        install_resolver(process)
    ((name, resolver),) = registered
    assert (name, resolver.process) == ("lora-plugins", process)
    assert process.resolver_of_worker() is not process.resolver
    for each in (process.resolver, process.resolver_of_worker()):
        assert asyncio.run(each.resolve("a", BASE.path, f"{uri}/sql")).rank == 4
        assert asyncio.run(each.resolve("sql", BASE.path)) is None


def test_startup_fails_with_a_malformed_uri_prefix(tmp_path, registered):
    process = Process(Settings(store_dir=tmp_path / "store", allowed_uris=("s3://a/../b",)))
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_ALLOWED_URIS"):
        install_resolver(process)
    assert (registered, process.is_resolver_registered) == ([], False)


# --- under the names of vLLM's builtin resolvers


@pytest.fixture
def module(monkeypatch):
    module = ModuleType("a_builtin_of_vllm")
    module.register = lambda: "builtin"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_builtin_that_was_taken_over_can_still_be_called(module):
    assert lora_resolver.builtin(module.__name__, "register")() == "builtin"
    for _ in range(2):
        lora_resolver.take_over(module.__name__, "register", lambda: "ours")
        assert module.register() == "ours"
        assert lora_resolver.builtin(module.__name__, "register")() == "builtin"


def test_the_base_model_is_read_off_the_server():
    base = describe_base(served(SimpleNamespace(max_lora_rank=64)), Settings(base_aliases=("alias",)))
    assert (base.path, base.served_names, base.aliases) == ("org/tiny", ("tiny", "tiny-2"), ("alias",))
    assert (base.max_rank, base.lora_enabled) == (64, True)
    assert base.model is None, "the engine has not been asked"
    base = describe_base(served(None), Settings())
    assert (base.max_rank, base.lora_enabled) == (None, False)
