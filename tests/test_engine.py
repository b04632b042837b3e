"""Where we touch vLLM: the ledger against the installed sources, errors as vLLM answers them, shapes of real models."""

from __future__ import annotations

import ast
import asyncio
import copy
import gc
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lora_plugins import engine
from lora_plugins.base_model import BaseModel
from lora_plugins.engine import SEAMS, LoRAPluginsResolver, NameLocks, Seam, http_error
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    InvalidSettings,
    LoRAPluginsError,
    NoFreeSlot,
    OutOfMemory,
    SourceUnavailable,
)
from lora_plugins.resolvers.chain import lora_id
from lora_plugins.resolvers.filesystem import FilesystemSource
from lora_plugins.served_model import describe_base, module_shapes
from lora_plugins.settings import Settings
from tests.make import BASE, adapter_files, put
from tools import check_seams

# --- the ledger


def seam(symbol: str, *has: str) -> Seam:
    return Seam(symbol, has, what="", why="", since="", remove="")


@pytest.mark.parametrize("entry", SEAMS, ids=lambda entry: entry.symbol)
def test_the_installed_vllm_has_the_seam(entry):
    assert check_seams.check(entry, check_seams.installed()) == ""


@pytest.mark.parametrize("entry", SEAMS, ids=lambda entry: entry.symbol)
def test_every_entry_says_what_why_since_and_how_to_remove_it(entry):
    assert all((entry.what, entry.why, entry.since, entry.remove))


def test_whatever_the_package_imports_from_vllm_stands_in_the_ledger():
    noted = [f"{entry.symbol.replace(':', '.')}." for entry in SEAMS]
    imported = []
    for file in Path(engine.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                imported += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                imported += [alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"]
    assert len(imported) > 10
    assert [name for name in imported if not any(symbol.startswith(f"{name}.") for symbol in noted)] == []


def test_the_checker_runs_as_a_command_and_imports_no_vllm():
    tool = Path(check_seams.__file__)
    script = (
        f"import runpy, sys; sys.argv = ['check_seams.py']\n"
        f"try: runpy.run_path({str(tool)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'vllm' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(SEAMS)
    assert all("as noted" in line for line in done.stdout.splitlines())


SOURCE = """
import os
from other import moved as Here
if os.name:
    CONSTANT: int = 1
else:
    CONSTANT = 2
async def function(a, /, b, *more, c=1, **rest): ...
class Class:
    field: int
    other = 2
    def __init__(self, x):
        self.late = x
    @overload
    def method(self, old): ...
    def method(self, new, *, key): ...
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "vllm" / "package").mkdir(parents=True)
    for name in ("vllm/__init__.py", "vllm/module.py", "vllm/package/__init__.py"):
        (tmp_path / name).write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    "entry",
    [
        seam("vllm.module:function", "a", "b", "*more", "c", "**rest"),
        seam("vllm.package:function", "a", "b", "*more", "c", "**rest"),
        seam("vllm.module:function", "a", "b", "..."),
        seam("vllm.module:function", "a", "b", "*more", "c", "**rest", "..."),
        seam("vllm.module:Class"),
        seam("vllm.module:Class", "late", "field", "other", "method"),
        seam("vllm.module:Class.method", "self", "new", "key"),
        seam("vllm.module:Class.field"),
        seam("vllm.module:CONSTANT"),
        seam("vllm.module:Here"),
    ],
    ids=lambda entry: entry.symbol,
)
def test_the_checker_takes_what_is_there(sources, entry):
    assert check_seams.check(entry, sources) == ""


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (seam("vllm.gone:x"), "no module vllm.gone"),
        (seam("vllm.module:gone"), "no gone in vllm.module"),
        (seam("vllm.module:Class.gone"), "no Class.gone in vllm.module"),
        (seam("vllm.module:function.inner"), "no function.inner"),
        (seam("vllm.module:moved"), "no moved in vllm.module"),
        (seam("vllm.module:function", "a", "b"), "parameters are (a, b, *more, c, **rest), not (a, b)"),
        (seam("vllm.module:function", "b", "..."), "parameters are (a, ...), not (b, ...)"),
        (seam("vllm.module:Class.method", "self", "key", "new"), "parameters are (self, new, key)"),  # the order
        (seam("vllm.module:Class.method", "self", "old"), "parameters are (self, new, key)"),  # an overload
        (seam("vllm.module:Class", "field", "gone", "x"), "no gone, x in it"),
        (seam("vllm.module:CONSTANT", "field"), "no field in it"),
    ],
)
def test_the_checker_says_what_differs(sources, entry, says):
    assert says in check_seams.check(entry, sources)


def test_the_checker_fails_on_a_changed_signature(tmp_path, capsys):
    installed = check_seams.installed()
    for entry in SEAMS:
        module = Path(*entry.symbol.partition(":")[0].split("."))
        file = (
            module.with_suffix(".py") if (installed / module.with_suffix(".py")).is_file() else module / "__init__.py"
        )
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / file, tmp_path / file)
    assert check_seams.main([str(tmp_path)]) == 0
    resolver = tmp_path / "vllm" / "lora" / "resolver.py"
    changed = resolver.read_text().replace("base_model_name: str, lora_name: str", "lora_name: str")
    assert changed != resolver.read_text()
    resolver.write_text(changed)
    capsys.readouterr()
    assert check_seams.main([str(tmp_path)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "differs" in line]
    assert "LoRAResolver.resolve_lora: parameters are (self, lora_name)" in line


def test_the_checker_reads_several_versions(sources, capsys):
    for number in ("1.0", "2.0"):
        one = sources / number
        shutil.copytree(sources / "vllm", one / "vllm")
        (one / f"vllm-{number}.dist-info").mkdir()
        (one / f"vllm-{number}.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {number}\n")
    paths = [str(sources / number) for number in ("1.0", "2.0")]
    assert check_seams.main(paths, [seam("vllm.module:Class")]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["vllm 1.0", "vllm 2.0"]
    assert check_seams.main(paths, [seam("vllm.module:Gone")]) == 1


def test_a_directory_without_vllm_is_no_success(tmp_path):
    with pytest.raises(SystemExit, match="no directory vllm"):
        check_seams.main([str(tmp_path)])


# --- errors


def test_not_found_is_vllms_404():
    from vllm.exceptions import VLLMNotFoundError

    error = http_error(AdapterNotFound("x", adapter="sql"))
    assert isinstance(error, VLLMNotFoundError)
    assert str(error) == "[L002] adapter 'sql': found x."


@pytest.mark.parametrize("kind", [IncompatibleAdapter, InvalidAdapter])
def test_a_refused_adapter_is_vllms_400(kind):
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    error = http_error(kind("x", adapter="sql"))
    assert isinstance(error, VLLMClientError)
    assert not isinstance(error, VLLMNotFoundError)
    assert str(error) == f"[{kind.code}] adapter 'sql': found x."


@pytest.mark.parametrize(("kind", "status"), [(SourceUnavailable, 503), (NoFreeSlot, 503), (OutOfMemory, 507)])
def test_what_is_nobodys_fault_keeps_its_status_and_says_when_to_try_again(kind, status):
    from fastapi import HTTPException

    error = http_error(kind("x"))
    assert isinstance(error, HTTPException)
    assert (error.status_code, error.detail) == (status, f"[{kind.code}] found x.")
    expected = {} if kind.retry_after_s is None else {"Retry-After": str(kind.retry_after_s)}
    assert error.headers == expected
    assert bool(expected) == (status == 503)


@pytest.fixture
def answered(monkeypatch):
    """A function from one of our errors to the response of an application with vLLM's own exception handlers."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.exception_handling import register

    monkeypatch.setattr(register, "http_exception_handler", register.http_exception_handler)  # put back afterwards
    engine._keep_http_headers()
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    register.init_exception_handler(app)
    errors: list[LoRAPluginsError] = []

    @app.get("/")
    def route():
        raise http_error(errors.pop())

    def answer(error: LoRAPluginsError):
        errors.append(error)
        return TestClient(app, raise_server_exceptions=False).get("/")

    return answer


@pytest.mark.parametrize(
    ("kind", "status", "retry"),
    [
        (AdapterNotFound, 404, None),
        (IncompatibleAdapter, 400, None),
        (InvalidAdapter, 400, None),
        (SourceUnavailable, 503, "5"),
        (NoFreeSlot, 503, "1"),
        (OutOfMemory, 507, None),
    ],
)
def test_vllms_handlers_answer_with_our_status_text_and_headers(answered, kind, status, retry):
    response = answered(kind("x\ud800", adapter="sql", remedy="copy it"))
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry)
    message = response.json()["error"]["message"]
    for part in (f"[{kind.code}]", "'sql'", "copy it"):
        assert part in message


# --- the resolver


@pytest.fixture
def resolver(tmp_path):
    (tmp_path / "root").mkdir()
    resolver = LoRAPluginsResolver(Settings(store_dir=tmp_path / "store"))
    resolver.add(lambda executor: FilesystemSource(tmp_path / "root", executor=executor))
    resolver.chain.base = BASE
    return resolver


def resolve(resolver, name):
    return asyncio.run(resolver.resolve_lora(BASE.path, name))


def test_a_found_adapter_becomes_vllms_request(resolver, tmp_path):
    put(tmp_path / "root" / "team" / "sql", adapter_files())
    request = resolve(resolver, "team/sql")
    assert type(request).__name__ == "LoRARequest"
    assert request.lora_name == "team/sql"
    assert Path(request.lora_path).parent == tmp_path / "store"
    assert (request.lora_int_id, request.base_model_name) == (lora_id("team/sql"), "tiny")


def test_before_the_server_is_bound_the_request_names_no_base_model(resolver, tmp_path):
    put(tmp_path / "root" / "sql", adapter_files())
    resolver.chain.base = None
    assert resolve(resolver, "sql").base_model_name is None


def test_an_unknown_adapter_is_none(resolver):
    assert resolve(resolver, "sql") is None
    assert resolve(resolver, "../root") is None


def test_a_broken_adapter_is_vllms_400_with_our_text(resolver, tmp_path):
    from vllm.exceptions import VLLMClientError

    put(tmp_path / "root" / "sql", {**adapter_files(), "adapter_config.json": b"{"})
    with pytest.raises(VLLMClientError, match=r"\[L005\] adapter 'sql', file 'adapter_config.json'") as caught:
        resolve(resolver, "sql")
    assert caught.value.__cause__ is None  # the refusal has been logged; vLLM would log its traceback again


# --- the served model


def llama(**changes):
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**{**sizes, "architectures": ["LlamaForCausalLM"], **changes})


def test_shapes_of_a_llama():
    shapes = module_shapes(llama())
    layer = "model.layers.1."
    assert shapes == {
        "model.embed_tokens": (96, 16),
        "lm_head": (16, 96),
        **{
            f"model.layers.{number}.{part}": shape
            for number in range(2)
            for part, shape in {
                "self_attn.q_proj": (16, 16),
                "self_attn.k_proj": (16, 8),
                "self_attn.v_proj": (16, 8),
                "self_attn.o_proj": (16, 16),
                "mlp.gate_proj": (16, 40),
                "mlp.up_proj": (16, 40),
                "mlp.down_proj": (40, 16),
            }.items()
        },
    }
    assert layer + "self_attn.k_proj" in shapes


def test_shapes_of_a_gpt2_whose_linear_layers_are_conv1d():
    from transformers import GPT2Config

    shapes = module_shapes(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=96, n_positions=32, architectures=["GPT2LMHeadModel"])
    )
    assert shapes["transformer.h.0.attn.c_attn"] == (16, 48)
    assert shapes["transformer.h.0.attn.c_proj"] == (16, 16)
    assert shapes["transformer.h.0.mlp.c_fc"] == (16, 64)
    assert shapes["transformer.h.0.mlp.c_proj"] == (64, 16)
    assert shapes["transformer.wte"] == (96, 16)


def test_shapes_leave_the_servers_configuration_alone():
    # Building a model writes, among others, the attention implementation into its configuration.
    config = llama()
    before = copy.deepcopy(vars(config))
    module_shapes(config)
    assert vars(config) == before


@pytest.mark.parametrize(
    ("architectures", "says"),
    [(["NoSuchForCausalLM"], "NoSuchForCausalLM"), (None, "unnamed"), (["LlamaTokenizer"], "cannot be built")],
)
def test_an_unknown_architecture_has_no_shapes_and_says_so(logged, architectures, says):
    assert module_shapes(llama(architectures=architectures)) == {}
    (record,) = [record for record in logged.records if record.name == "vllm.lora_plugins"]
    assert record.levelname == "WARNING"
    assert says in record.getMessage()


def test_a_configuration_that_builds_no_model_has_no_shapes_and_says_so(logged):
    assert module_shapes(llama(hidden_act="no_such_function")) == {}
    assert "Shapes are not checked" in logged.text


def served(lora_config: object) -> SimpleNamespace:
    """What `describe_base` reads off vLLM's OpenAIServingModels."""
    return SimpleNamespace(
        engine_client=SimpleNamespace(vllm_config=SimpleNamespace(lora_config=lora_config)),
        model_config=SimpleNamespace(model="org/tiny", hf_config=llama()),
        base_model_paths=[SimpleNamespace(name="tiny"), SimpleNamespace(name="tiny-2")],
    )


def test_the_base_model_is_read_off_the_server():
    base = describe_base(served(SimpleNamespace(max_lora_rank=64)), Settings(base_aliases=("alias",)))
    assert (base.path, base.served_names, base.aliases) == ("org/tiny", ("tiny", "tiny-2"), ("alias",))
    assert (base.max_rank, base.lora_enabled) == (64, True)
    assert base.module_shapes["lm_head"] == (16, 96)


@pytest.fixture
def start_serving(resolver, monkeypatch):
    """A function that makes vLLM's own OpenAIServingModels, after our resolver has asked to be bound to it."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    monkeypatch.setattr(OpenAIServingModels, "__init__", OpenAIServingModels.__init__)  # put back afterwards
    engine._bind_when_serving(resolver)

    def start(lora_config: object):
        like = served(lora_config)
        like.engine_client.model_config = like.model_config
        like.engine_client.renderer = like.engine_client.input_processor = None
        return OpenAIServingModels(like.engine_client, like.base_model_paths, lora_modules=None)

    return start


def test_when_serving_starts_the_resolver_learns_the_base_model_and_the_log_says_who_is_in_charge(
    resolver, start_serving, logged
):
    resolver.chain.settings = Settings(runtime_lora_updating=True)
    models = start_serving(SimpleNamespace(max_lora_rank=64))
    assert [path.name for path in models.base_model_paths] == ["tiny", "tiny-2"]
    assert resolver.chain.base.served_names == ("tiny", "tiny-2")
    (line,) = [record.getMessage() for record in logged.records if record.levelname == "INFO"]
    for part in ("lora-plugins", str(resolver.chain.sources[0]), "compatible", "largest rank 64"):
        assert part in line
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in logged.text
    assert "--enable-lora" not in logged.text


def test_a_server_that_will_never_serve_an_adapter_says_so_at_start(start_serving, logged):
    start_serving(None)
    warnings = [record.getMessage() for record in logged.records if record.levelname == "WARNING"]
    assert any("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in text for text in warnings)
    assert any("--enable-lora" in text for text in warnings)


def test_a_server_without_lora_is_seen():
    base = describe_base(served(None), Settings())
    assert isinstance(base, BaseModel)
    assert (base.max_rank, base.lora_enabled) == (None, False)


def test_when_serving_starts_vllms_locks_are_dropped_with_their_last_user(start_serving):
    models = start_serving(None)
    assert isinstance(models.lora_resolver_lock, NameLocks)


def test_a_store_that_cannot_be_made_ends_the_start(start_serving, resolver, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    resolver.settings = Settings(store_dir=tmp_path / "file" / "store")
    del resolver.chain  # not yet made
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_STORE_DIR"):
        start_serving(None)


# --- the resolver's parts are made late


def test_nothing_is_made_before_the_first_use(tmp_path):
    made = []

    def make_source(executor):
        made.append(executor)
        return FilesystemSource(tmp_path, executor=executor)

    before = threading.active_count()
    resolver = LoRAPluginsResolver(Settings(store_dir=tmp_path / "store"))
    resolver.add(make_source)
    assert (made, threading.active_count(), (tmp_path / "store").exists()) == ([], before, False)
    assert resolver.chain is resolver.chain
    assert len(made) == 1
    assert (tmp_path / "store").is_dir()


def test_a_source_added_twice_is_asked_once(resolver, tmp_path):
    again = LoRAPluginsResolver(resolver.settings)
    for _ in range(2):
        again.add(lambda executor: FilesystemSource(tmp_path / "root", executor=executor))
    assert [source.label for source in again.chain.sources] == ["filesystem"]


def test_uris_are_served_where_no_source_is_named_and_a_worker_knows_them_too(tmp_path, monkeypatch):
    registered = []
    monkeypatch.setattr(engine, "_resolver", None)
    monkeypatch.setattr(engine, "_register", registered.append)
    assert engine.sources_of_worker() is None
    uri = (tmp_path / "adapters").as_uri()
    put(tmp_path / "adapters" / "sql", adapter_files())
    settings = Settings(store_dir=tmp_path / "store", allowed_uris=(uri,))
    resolver = engine.resolver_of_process(settings)
    assert engine.resolver_of_process(settings) is resolver
    assert registered == [resolver]
    for chain in (resolver.chain, engine.sources_of_worker()):
        assert asyncio.run(chain.resolve_uri("a", f"{uri}/sql", BASE.path)).rank == 4
        assert asyncio.run(chain.resolve("sql", BASE.path)) is None


def test_a_prefix_that_cannot_be_right_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_resolver", None)
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_ALLOWED_URIS"):
        engine.resolver_of_process(Settings(store_dir=tmp_path / "store", allowed_uris=("s3://a/../b",)))
    assert engine._resolver is None


# --- the builtins' names


@pytest.fixture
def module(monkeypatch):
    module = ModuleType("a_builtin_of_vllm")
    module.register = lambda: "builtin"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(engine, "_builtins", {})
    return module


def test_a_builtin_that_was_taken_over_can_still_be_called(module):
    assert engine.builtin(module.__name__, "register")() == "builtin"
    engine.take_over(module.__name__, "register", lambda: "ours")
    assert module.register() == "ours"
    assert engine.builtin(module.__name__, "register")() == "builtin"


def test_taken_over_twice_the_builtin_is_still_the_builtin(module):
    for _ in range(2):
        engine.take_over(module.__name__, "register", lambda: "ours")
    assert engine.builtin(module.__name__, "register")() == "builtin"


# --- locks by name


def test_a_name_has_one_lock_while_it_is_held_and_none_afterwards():
    async def run() -> None:
        locks = NameLocks()
        async with locks["sql"]:
            assert locks["sql"] is locks["sql"]
            assert locks["sql"].locked()
            assert not locks["other"].locked()
            gc.collect()
            assert len(locks) == 1
        gc.collect()
        assert len(locks) == 0

    asyncio.run(run())


def test_a_lock_that_is_awaited_is_the_one_that_is_held():
    locks = NameLocks()
    order: list[str] = []

    async def hold(name: str) -> None:
        async with locks["sql"]:
            order.append(name)
            await asyncio.sleep(0)
            gc.collect()
            order.append(name)

    async def run() -> None:
        tasks = [asyncio.create_task(hold(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()  # one that waits gives up; the lock stays
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    gc.collect()  # the traceback of the one that gave up held the lock until here
    assert order == ["a", "a", "c", "c"]
    assert len(locks) == 0


def test_of_many_at_once_each_name_lets_one_in():
    async def run() -> None:
        locks = NameLocks()
        inside: Counter[str] = Counter()
        visits = 0

        async def visit(name: str) -> None:
            nonlocal visits
            async with locks[name]:
                inside[name] += 1
                assert inside[name] == 1
                await asyncio.sleep(0)
                inside[name] -= 1
                visits += 1

        await asyncio.gather(*(visit(f"name-{number % 7}") for number in range(700)))
        assert visits == 700
        assert len(locks) == 0

    asyncio.run(run())


def test_a_hundred_thousand_names_leave_nothing():
    async def run() -> None:
        locks = NameLocks()
        for number in range(100_000):
            async with locks[f"name-{number}"]:
                pass
        assert len(locks) == 0

    asyncio.run(run())
