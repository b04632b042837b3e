"""The policy before vLLM's own classes and routes: a forbidden name is an unknown one, in every respect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse

from lora_plugins.api.access.policy import Principal
from lora_plugins.api.access.principals import principal_of_request, require_admin
from lora_plugins.errors import InvalidSettings, SourceUnavailable
from lora_plugins.process import Process
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.vllm_patches.api_server import access, base_serving, openai_serving_models
from lora_plugins.vllm_patches.api_server.lora_resolver import LoRAPluginsResolver
from tests.make import adapter_files, put
from tests.resolvers.test_resolver import FakeSource
from tests.vllm_patches.put_back import put_back

POLICY = """
[default]
adapters = ["public/*"]
[tenants.a]
keys = ["key-a"]
adapters = ["team-a/*", "shared"]
[tenants.b]
keys = ["key-b"]
adapters = ["team-b/*", "shared", "audio"]
[tenants.root]
keys = ["key-root"]
admin = true
"""
KEYS = ["key-a", "key-b", "key-root", "unlisted"]
ROUTES = {"base": "/v1/completions", "pooling": "/v1/embeddings"}  # what every key reaches
EXISTING = ("team-a/sql", "team-b/sql", "team-b/chat", "team-b/v1.2", "shared", "public/x", "audio", "secret")


class Engine:
    """What OpenAIServingModels needs of the engine client."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(model="org/tiny", max_model_len=128, get_vocab_size=lambda: 32)
        self.renderer, self.input_processor = SimpleNamespace(tokenizer=None), None
        self.added: list[str] = []

    async def add_lora(self, request: Any) -> bool:
        self.added.append(request.lora_name)
        return True


class World:
    """vLLM's models, serving classes, routes and middleware around one made-up remote source."""

    def __init__(
        self,
        process: Process,
        tmp_path: Path,
        *,
        policy: Path | None = None,
        keys: Sequence[str] = (),
        admin_key: str | None = None,
        uds: str | None = None,
    ) -> None:
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
        from vllm.entrypoints.serve.engine.serving import BaseServing

        self.source = FakeSource("s3", dict.fromkeys(EXISTING, adapter_files()))
        self.process = process
        process.settings = Settings(
            store_dir=tmp_path / "store", base_match=BaseMatch.OFF, policy=policy, admin_key=admin_key
        )
        process.add_source(self.source)
        self.engine = Engine()
        self.models = OpenAIServingModels(self.engine, [BaseModelPath("tiny", "org/tiny")], lora_modules=None)
        self.models.lora_resolvers = [LoRAPluginsResolver(process)]
        abstract = dict.fromkeys(("__init__", *PoolingBaseServing.__abstractmethods__), _nothing)
        pooling = type("Pooling", (PoolingBaseServing,), abstract)()
        pooling.models, pooling.request_logger = self.models, None
        self.servings = {"base": BaseServing(self.models, self.engine.model_config), "pooling": pooling}
        self.app = self._app(list(keys), uds)

    def _app(self, keys: list[str], uds: str | None) -> FastAPI:
        from vllm.entrypoints.openai.models import api_router as models_routes
        from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
        from vllm.entrypoints.serve.lora import api_router as lora_routes
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

        app = FastAPI()
        app.state.args = SimpleNamespace(api_key=keys, uds=uds, log_error_stack=False)
        app.state.openai_serving_models = self.models
        models_routes.attach_router(app)
        level = logging.root.level
        lora_routes.attach_router(app)
        logging.root.setLevel(level)  # a library of SageMaker's that vLLM imports here sets it

        @app.post(ROUTES["base"])
        @app.post(ROUTES["pooling"])
        async def use(asked: Request, body: dict[str, Any]) -> Any:
            """What vLLM's handlers do with a request before it goes to the engine."""
            kind = next(kind for kind, path in ROUTES.items() if path == asked.url.path)
            serving, request = self.servings[kind], SimpleNamespace(**body)
            refused = await serving._check_model(request)
            if refused is not None:
                return JSONResponse(refused.model_dump(), refused.error.code)
            found = serving._maybe_get_adapters(request, kind == "base")
            assert request.model == body["model"], "the request is as it was"
            return {"adapter": None if found is None else found.lora_name}

        @app.get("/v1/mine", dependencies=[Depends(require_admin)])
        async def mine() -> str:
            return principal_of_request.get().label if principal_of_request.get() else "nobody"

        base_serving.patch()
        openai_serving_models.patch()
        access.install(app, self.process)
        init_exception_handler(app)
        if app.state.args.api_key:  # as vLLM's init_entrypoints_middleware, after the endpoint plugins
            app.add_middleware(AuthenticationMiddleware, tokens=app.state.args.api_key)
        return app

    def send(
        self, method: str, path: str, key: str | None = None, *, client: Any = ("127.0.0.1", 1), **more: Any
    ) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=client)
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as sender:
                return await sender.request(method, path, **more)

        return asyncio.run(go())

    def use(self, name: Any, key: str | None = "key-a", kind: str = "base", **more: Any) -> httpx.Response:
        return self.send("POST", ROUTES[kind], key, json={"model": name, **more})

    def load(self, *names: str) -> None:
        for name in names:
            assert self.use(name, "key-root").json() == {"adapter": name}

    def listed(self, key: str | None) -> list[str]:
        return [card["id"] for card in self.send("GET", "/v1/models", key).json()["data"]]


def _nothing(self: Any) -> None:
    pass


@pytest.fixture
def vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.serve.engine.serving import BaseServing

    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with put_back(BaseServing, PoolingBaseServing, OpenAIServingModels):
        yield


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "policy.toml").write_text(POLICY)
    return tmp_path / "policy.toml"


@pytest.fixture
def world(process: Process, tmp_path: Path, policy: Path, vllm_as_it_was: None) -> World:
    return World(process, tmp_path, policy=policy, keys=KEYS)


def seen(answer: httpx.Response, name: str) -> tuple[int, str, dict[str, str]]:
    """All that a client sees, without the name that it has asked for."""
    headers = {key: value for key, value in answer.headers.items() if key != "content-length"}
    return answer.status_code, answer.text.replace(name, "<name>"), headers


kinds = pytest.mark.parametrize("kind", ["base", "pooling"])


# --- what one may use


@kinds
def test_every_key_may_use_its_adapters_and_the_base_model(world, kind):
    asked = []
    for key, names in {
        "key-a": ("team-a/sql", "shared"),
        "key-b": ("team-b/chat", "shared"),
        "key-root": ("team-b/sql", "secret"),
        "unlisted": ("public/x",),
    }.items():
        for name in ("tiny", None, ""):
            assert world.use(name, key, kind).json() == {"adapter": None}
        for name in names:
            assert world.use(name, key, kind).json() == {"adapter": name}
        asked = list(dict.fromkeys([*asked, *names]))
        assert world.source.asked == world.engine.added == asked


# --- what one may not use

FORBIDDEN_NAMES = ("team-b/sql", "team-b/nobody", "secret", "no-such-team/x", "team-b/v1.2", "nobody@v1", "-x", "a//b")


@kinds
@pytest.mark.parametrize("key", ["key-a", "unlisted"])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_forbidden_name_is_answered_like_an_unknown_one(world, kind, key, loaded):
    if loaded:
        world.load("team-b/sql", "team-b/v1.2", "secret")
    own = {"key-a": "team-a/nobody", "unlisted": "public/nobody"}[key]
    unknown = seen(world.use(own, key, kind), own)
    assert unknown[0] == 404
    assert "<name>" in unknown[1]
    for name in FORBIDDEN_NAMES:
        assert seen(world.use(name, key, kind), name) == unknown, name


@kinds
def test_vllm_removes_paths_from_these_texts_too(world, kind, monkeypatch):
    names = ["x/a/b/v1.2", "x/home/secret", "x/tmp/y", "team-b/srv/a.b", "a'\"b"]
    answers = [world.use(name, "key-a", kind).text for name in names]
    monkeypatch.setattr(Principal, "may_use", lambda *_: True)
    assert [world.use(name, "key-a", kind).text for name in names] == answers


@kinds
@pytest.mark.parametrize("loaded", [False, True])
def test_nothing_is_looked_up_for_a_forbidden_name(world, kind, loaded, monkeypatch):
    """Whatever could take longer for a name that exists: the table, the name's lock, resolvers, sources, the engine."""
    if loaded:
        world.load("team-b/sql", "secret")
    served, asked = dict(world.models.lora_requests), list(world.source.asked)
    world.models.lora_resolver_lock = world.models.lora_resolvers = world.engine = None
    monkeypatch.setattr(world.models, "lora_requests", Unreadable())
    for _ in range(2):
        for name in FORBIDDEN_NAMES:
            assert world.use(name, "key-a", kind).status_code == 404
    monkeypatch.setattr(world.models, "lora_requests", served)
    assert world.source.asked == asked
    assert world.listed("key-b") == (["tiny", "team-b/sql"] if loaded else ["tiny"])


class Unreadable(dict[str, Any]):
    """A table that nobody may look into."""

    def _fail(self, *_: Any) -> Any:
        raise AssertionError("looked up")

    __contains__ = __getitem__ = __iter__ = get = values = items = keys = _fail


@kinds
def test_an_outage_shows_for_own_names_only(world, kind):
    async def away(name: Any, base: str) -> Any:
        raise SourceUnavailable("no answer")

    world.source.locate = away
    answer = world.use("team-a/sql", "key-a", kind)
    assert (answer.status_code, "'team-a/sql'" in answer.text) == (503, True)
    for name in ("team-b/sql", "team-b/nobody"):
        assert world.use(name, "key-a", kind).status_code == 404


def test_without_name_validation_a_forbidden_name_is_the_base_model(world, monkeypatch):
    world.load("team-b/sql")
    monkeypatch.setenv("VLLM_SKIP_MODEL_NAME_VALIDATION", "1")
    for name in ("team-b/sql", "nobody"):
        assert world.use(name, "key-a").json() == {"adapter": None}
    assert world.use("team-b/sql", "key-b").json() == {"adapter": "team-b/sql"}


def test_default_multimodal_adapters_need_permission_too(world):
    """vLLM applies an adapter that is declared for `audio` to chats with audio in them."""
    world.load("audio")
    declared = SimpleNamespace(default_mm_loras={"audio": "/adapters/audio"})
    world.models.engine_client.vllm_config = SimpleNamespace(lora_config=declared)
    messages = [{"role": "user", "content": [{"type": "audio_url"}]}]
    assert world.use("tiny", "key-b", messages=messages).json() == {"adapter": "audio"}
    assert world.use("tiny", "key-a", messages=messages).json() == {"adapter": None}


def test_without_a_request_the_default_rights_apply(world):
    async def check(name: str) -> Any:
        return await world.servings["base"]._check_model(SimpleNamespace(model=name))

    assert asyncio.run(check("public/x")) is None
    assert asyncio.run(check("team-a/sql")).error.code == 404


# --- listing, and what administrators may


def test_at_start_vllm_loads_its_static_modules(world):
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath

    world.models.static_lora_modules = [LoRAModulePath(name="team-b/static", path="/x")]
    asyncio.run(world.models.init_static_loras())
    assert "team-b/static" in world.listed("key-b")
    assert "team-b/static" not in world.listed("key-a")


# --- links between the prefixes of tenants


@pytest.mark.parametrize("what", ["directory", "files", "folder"])
def test_a_link_to_another_tenants_adapter_is_no_adapter(process, tmp_path, policy, vllm_as_it_was, what):
    root = tmp_path / "adapters"
    theirs = put(root / "team-b" / "sql", adapter_files())
    (root / "team-a").mkdir()
    if what == "files":
        (root / "team-a" / "steal").mkdir()
        for file in adapter_files():
            (root / "team-a" / "steal" / file).symlink_to(theirs / file)
    elif what == "directory":
        (root / "team-a" / "steal").symlink_to("../team-b/sql")
    else:
        (root / "team-a" / "folder").symlink_to("../team-b")
    put(root / "team-a" / "sql-v3", adapter_files())
    (root / "team-a" / "sql").symlink_to("sql-v3")
    world = World(process, tmp_path, policy=policy, keys=KEYS)
    process.add_source(FilesystemSource(root, may_lead=process.may_lead))
    world.source.answers.clear()
    name = "team-a/folder/sql" if what == "folder" else "team-a/steal"
    for key in ("key-a", "key-root"):  # an administrator would load it for the tenant too
        refused, unknown = world.use(name, key), world.use("team-a/none", key)
        assert refused.status_code == unknown.status_code == 404
        assert refused.text.replace(name, "team-a/none") == unknown.text
    assert world.use("team-a/sql").json() == {"adapter": "team-a/sql"}
    assert world.use("team-b/sql", "key-b").json() == {"adapter": "team-b/sql"}


# --- without a policy


def may(world: World, *, key: str | None = None, **more: Any) -> list[int]:
    """What our routes, vLLM's, and one that reaches vLLM's methods by another way (as SageMaker's does) answer."""
    from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

    @world.app.delete("/adapters/{name}")
    async def unload(name: str) -> Any:
        return await world.models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))

    asked = (
        ("GET", "/v1/loras", {}),
        ("GET", "/v1/mine", {}),
        ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "new", "lora_path": "/x"}}),
        ("DELETE", "/adapters/new", {}),
    )
    return [world.send(method, path, key, **body, **more).status_code for method, path, body in asked]


YES = [404, 200, 200, 200]  # this application has no /v1/loras


NO, NEAR, FAR = [403] * 4, ("127.0.0.1", 1), ("10.0.0.7", 1)
# The server, the key, the caller, and what is answered.
MAY: list[tuple[dict[str, Any], str | None, Any, list[int]]] = [
    *[({}, None, client, YES) for client in (NEAR, ("::ffff:127.0.0.1", 1))],
    ({"uds": "/run/x"}, None, None, YES),
    ({"keys": KEYS}, "key-a", FAR, YES),
    # vLLM asks for no key beside /v1; we do.
    ({"keys": KEYS}, "nobodys", FAR, [401, 401, 401, 403]),
    ({"admin_key": "the-key"}, "the-key", FAR, YES),
    ({"admin_key": "the-key", "keys": KEYS}, "the-key", FAR, YES),
    ({"admin_key": "the-key", "keys": KEYS}, "key-a", NEAR, NO),
    ({"admin_key": "the-key", "keys": KEYS, "policy": "policy.toml"}, "the-key", NEAR, YES),
    ({"admin_key": "the-key", "keys": KEYS, "policy": "policy.toml"}, "key-root", NEAR, YES),
    ({"admin_key": "the-key", "keys": KEYS, "policy": "policy.toml"}, "key-a", NEAR, NO),
]


@pytest.mark.parametrize(("server", "key", "client", "answers"), MAY, ids=str)
def test_who_may_administer(process, tmp_path, policy, vllm_as_it_was, server, key, client, answers):
    world = World(process, tmp_path, **server | ({"policy": policy} if "policy" in server else {}))
    assert may(world, key=key, client=client) == answers
    if "keys" in server:
        name = "shared" if "policy" in server else "team-b/sql"
        assert world.use(name, key).status_code == (401 if key == "nobodys" else 200), "administrators use too"
        assert world.use("shared", None).status_code == 401


def test_a_page_under_a_name_of_its_own_may_not(process, tmp_path, vllm_as_it_was):
    world = World(process, tmp_path)
    assert may(world, headers={"Host": "evil.example:8000"}) == [403] * 4
    text = world.send("GET", "/v1/loras", headers={"Host": "evil.example:8000"}).json()["error"]["message"]
    assert text.startswith("[L008] found a call under a name that is not this machine's own, evil.example:8000")


def test_without_any_key_no_other_machine_may(process, tmp_path, vllm_as_it_was):
    world = World(process, tmp_path)
    for client in (("10.0.0.7", 1), ("::ffff:10.0.0.7", 1), ("2001:db8::1", 1), None, ("", 0)):
        assert may(world, client=client) == [403] * 4
        assert "new" not in world.models.lora_requests
        text = world.send("GET", "/v1/loras", client=client).json()["error"]["message"]
        assert text.startswith("[L008] found a caller ")
        assert "set LORA_PLUGINS_ADMIN_KEY for the server" in text
        assert world.send("DELETE", "/adapters/new", client=client).json()["error"]["message"] == text
        used = world.send("POST", ROUTES["base"], client=client, json={"model": "shared"})
        assert used.json() == {"adapter": "shared"}


def test_with_an_admin_key_loopback_needs_it_too(process, tmp_path, vllm_as_it_was):
    world = World(process, tmp_path, admin_key="the-key")
    assert may(world) == [401, 403, 401, 403]
    assert may(world, key="the-ke") == may(world, key="the-key ") == [403] * 4
    refused = world.send("GET", "/v1/loras")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["message"] == (
        "[L008] found no key in the Authorization header; expected the key of LORA_PLUGINS_ADMIN_KEY. "
        "To fix: send it as 'Authorization: Bearer KEY'."
    )
    assert "the-key" not in world.send("GET", "/v1/loras", "other").text


def test_the_environments_key_of_vllm_stays_valid(process, tmp_path, vllm_as_it_was, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key-a")
    world = World(process, tmp_path, admin_key="the-key")
    assert world.app.state.args.api_key == ["key-a", "the-key"]
    assert world.use("shared", "key-a").json() == {"adapter": "shared"}


@pytest.mark.parametrize(
    ("how", "level", "says"),
    [
        ({}, "WARNING", "callers on this machine (loopback) only"),
        ({"uds": "/run/x"}, "WARNING", "whoever can connect to the Unix socket only"),
        ({"keys": KEYS}, "INFO", "every key of --api-key"),
        ({"admin_key": "the-key"}, "INFO", "the key of LORA_PLUGINS_ADMIN_KEY"),
        ({"keys": KEYS, "admin_key": "the-key"}, "INFO", "the key of LORA_PLUGINS_ADMIN_KEY"),
    ],
)
def test_startup_logs_who_may_administer(process, tmp_path, vllm_as_it_was, logged, how, level, says):
    World(process, tmp_path, **how)
    (record,) = [record for record in logged.records if "admin API" in record.getMessage()]
    assert (record.levelname, says in record.getMessage()) == (level, True)
    assert "the-key" not in logged.text


# --- installing it with a policy


def test_installed_twice_it_wraps_once(world, policy):
    from vllm.entrypoints.serve.engine.serving import BaseServing

    wrapped = BaseServing._check_model
    access.install(world.app, world.process)
    assert BaseServing._check_model is wrapped
    names = [middleware.cls.__name__ for middleware in world.app.user_middleware]
    assert names == ["AuthenticationMiddleware", "KnowPrincipal"], "vLLM's own stands outside"
    access.install(FastAPI(), world.process)
    assert BaseServing._check_model is wrapped


def test_startup_fails_with_a_wrong_policy(process, tmp_path, vllm_as_it_was):
    (tmp_path / "policy.toml").write_text("[tenant.x]")
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_POLICY"):
        World(process, tmp_path, policy=tmp_path / "policy.toml", keys=KEYS)


@pytest.mark.parametrize("setting", ["policy", "admin_key"])
def test_startup_fails_where_access_is_not_guarded(process, tmp_path, policy, vllm_as_it_was, setting):
    """vLLM itself goes on without an endpoint plugin that it cannot load."""
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    process.settings = Settings(
        store_dir=tmp_path / "store", **{setting: {"policy": policy, "admin_key": "the-key"}[setting]}
    )
    openai_serving_models.patch()
    client = Engine()
    client.model_config.hf_config = None

    def start() -> None:
        OpenAIServingModels(client, [BaseModelPath("tiny", "org/tiny")], lora_modules=None)

    with pytest.raises(InvalidSettings, match="lora_admin"):
        start()
    access.install(FastAPI(), process)
    start()


@pytest.mark.parametrize(
    ("keys", "of_vllm", "warning"),
    [
        (KEYS, "", None),
        ([], "", "without --api-key"),
        (["key-a", "other"], "", "No key of b, root"),
        ([], "key-b", "No key of a, root"),
    ],
)
def test_startup_logs_tenants_and_keys_that_vllm_refuses(
    process, tmp_path, policy, vllm_as_it_was, logged, monkeypatch, keys, of_vllm, warning
):
    if of_vllm:
        monkeypatch.setenv("VLLM_API_KEY", of_vllm)
    world = World(process, tmp_path, policy=policy, keys=keys)
    assert "3 keys of a, b, root" in logged.text
    assert "key-a" not in logged.text
    warned = [record.getMessage() for record in logged.records if record.levelname == "WARNING"]
    assert [warning in text for text in warned if "--api-key" in text] == ([] if warning is None else [True])
    if not keys and not of_vllm:
        assert world.use("team-a/sql", None).status_code == 404
        assert world.use("public/x", None).json() == {"adapter": "public/x"}
        assert world.use("team-a/sql", "key-a").json() == {"adapter": "team-a/sql"}
