"""Whose request it is, as far as ASGI says: the header, the context, and the administrators' routes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lora_plugins.api.access.administrators import Administrators
from lora_plugins.api.access.policy import Policy
from lora_plugins.api.access.principals import KnowPrincipal, principal_of_request
from lora_plugins.lifecycle.principal_limits import Rates

POLICY = Policy.parse(
    """
[tenants.a]
keys = ["key-a"]
adapters = ["a/*"]
[tenants.trainer]
keys = ["key-t"]
adapters = []
pushes = ["t/*", "v1?"]
[tenants.metered]
keys = ["key-m", "key-n"]
adapters = []
requests_per_minute = 2
[tenants.root]
keys = ["key-root"]
admin = true
"""
)


class App:
    """Notes for whom it ran, now and in the parts of its answer that come later."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.note()
        await asyncio.sleep(0.001)
        await asyncio.create_task(self.later())
        await asyncio.to_thread(self.note)

    async def later(self) -> None:
        self.note()

    def note(self) -> None:
        principal = principal_of_request.get()
        self.seen.append(None if principal is None else principal.label)


def scope_of(*headers: tuple[str, str], kind: str = "http", **more: Any) -> dict[str, Any]:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    given = {"type": kind, "path": "/v1/completions", "method": "POST", "root_path": "", "query_string": b""}
    return given | {"headers": raw} | more


def ask(
    *headers: tuple[str, str], administrators: Administrators | None = None, **scope: Any
) -> tuple[App, list[dict[str, Any]]]:
    app, sent = App(), []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(KnowPrincipal(app, administrators or Administrators(POLICY))(scope_of(*headers, **scope), None, send))
    return app, sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("headers", "label"),
    [
        ([("authorization", "Bearer key-a")], "a"),
        ([("Authorization", "bearer key-a")], "a"),
        ([("x", "y"), ("authorization", "BEARER key-root")], "root"),
        ([], "(default)"),
        ([("authorization", "")], "(default)"),
        ([("authorization", "Bearer")], "(default)"),
        ([("authorization", "key-a")], "(default)"),
        ([("authorization", "Basic key-a")], "(default)"),
        ([("authorization", "Bearer  key-a")], "(default)"),
        ([("authorization", "Bearer key-\xe9")], "(default)"),
        ([("authorization", "Bearer nobody"), ("authorization", "Bearer key-root")], "(default)"),
        ([("x-api-key", "key-root")], "(default)"),
    ],
)
def test_whose_request_it_is_wherever_its_code_runs(kind, headers, label):
    app, sent = ask(*headers, kind=kind, path="/v1/realtime" if kind == "websocket" else "/v1/completions")
    assert app.seen == [label] * 3
    assert sent == []
    assert principal_of_request.get() is None


def test_what_is_no_request_passes():
    app, _ = ask(kind="lifespan", path="")
    assert app.seen == [None] * 3


def test_requests_at_one_time_are_not_mixed_up():
    labels = {"key-a": "a", "key-root": "root", "nobody": "(default)"}
    seen: dict[str, str] = {}

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        seen[scope["path"]] = principal_of_request.get().label

    async def run() -> None:
        middleware = KnowPrincipal(answer, Administrators(POLICY))
        headers = [("authorization", f"Bearer {key}") for key in labels]
        scopes = [
            scope_of(it, path=f"/v1/responses/{key}", method="GET") for it, key in zip(headers, labels, strict=True)
        ]
        await asyncio.gather(*(middleware(scope, None, None) for scope in scopes))

    asyncio.run(run())
    assert seen == {f"/v1/responses/{key}": label for key, label in labels.items()}


ADMIN_PATHS = ["/v1/loras", "/v1/loras/", "/v1/loras/a/b", "/v1/load_lora_adapter", "/v1/unload_lora_adapter/"]


@pytest.mark.parametrize("with_policy", [True, False])
@pytest.mark.parametrize("path", [*ADMIN_PATHS, "/collective_rpc", "/collective_rpc\n", "/v1/loras/a\n"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_administrators_routes_are_closed_to_others(path, method, with_policy):
    rule = Administrators(POLICY) if with_policy else Administrators(key="key-root")
    for headers in ([("authorization", "Bearer key-b")], [("authorization", "Bearer key-a")]):
        for at, root_path in ((path, ""), ("/api" + path, "/api"), (path, "/api")):
            app, (start, body) = ask(*headers, path=at, method=method, root_path=root_path, administrators=rule)
            assert app.seen == []
            assert start["status"] == 403
            error = json.loads(body["body"])["error"]
            assert (error["code"], error["type"]) == (403, "Forbidden")
            assert int(dict(start["headers"])[b"content-length"]) == len(body["body"])
    app, _ = ask(("authorization", "Bearer key-root"), path=path, method=method)
    assert app.seen == ["root"] * 3


@pytest.mark.parametrize(
    ("method", "path", "root_path"),
    [
        ("GET", "/v1/models", ""),
        ("GET", "/v1/models/v1/loras", ""),  # a model of that name
        ("HEAD", "/health", ""),
        ("GET", "/metrics/", ""),
        ("GET", "/v1/responses/resp_1", ""),
        ("POST", "/v1/responses/resp_1/cancel", ""),
        ("POST", "/api/v1/completions", "/api"),
        ("POST", "/v1/completions", "/api"),
        ("POST", "/v1/completions\n", ""),  # as Starlette, whose patterns end in `$`
    ],
)
def test_tenants_routes_are_open(method, path, root_path):
    app, sent = ask(method=method, path=path, root_path=root_path)
    assert app.seen == ["(default)"] * 3
    assert sent == []


NOT_A_TENANTS = [
    ("POST", "/v1/models"),
    ("DELETE", "/v1/responses/resp_1"),
    ("GET", "/v1/responses/a/b"),
    ("GET", "/v1/completions"),
    ("GET", "/metricsx"),
    ("POST", "/v1/completions/"),
    ("POST", "//v1/completions"),
    ("POST", "/v1/completionsx"),
    ("POST", "/v1/completions\n\n"),
    ("GET", "/v1/lorasx"),
    ("GET", "/"),
    ("GET", ""),
    ("POST", "/apiv1/completions"),
]


@pytest.mark.parametrize(("method", "path"), NOT_A_TENANTS)
def test_every_other_route_is_administrators(method, path):
    for root_path in ("", "/api", "/v1"):
        app, (start, _) = ask(method=method, path=path, root_path=root_path)
        assert (app.seen, start["status"]) == ([], 403)
    app, _ = ask(("authorization", "Bearer key-root"), method=method, path=path)
    assert app.seen == ["root"] * 3


@pytest.mark.parametrize("path", ["/pause", "/v1/lorasx", "/"])
def test_without_a_policy_the_other_routes_are_open(path):
    app, sent = ask(path=path, administrators=Administrators(key="the-key"))
    assert (app.seen, sent) == (["(other)"] * 3, [])


@pytest.mark.parametrize("path", ["/v1/loras", "/v1/completions", "/v2/realtime"])
def test_a_websocket_to_an_administrators_route_is_closed(path):
    app, (closed,) = ask(kind="websocket", path=path)
    assert app.seen == []
    assert closed == {"type": "websocket.close", "code": 1008}


TRAINER = ("authorization", "Bearer key-t")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *((method, "/v1/loras/t/policy") for method in ("PUT", "GET", "DELETE")),
        *(("POST", f"/v1/loras/t/policy/{verb}") for verb in ("pause", "resume", "rollback")),
        ("PUT", "/behind/v1/loras/t/policy"),
        ("PUT", "/v1/loras/t/policy?x=%C3%A9&y=%ff"),
    ],
)
def test_a_key_pushes_below_its_own_prefix(method: str, path: str) -> None:
    root_path = "/behind" if path.startswith("/behind") else ""
    path, _, query = path.partition("?")
    app, sent = ask(TRAINER, method=method, path=path, root_path=root_path, query_string=query.encode())
    assert (set(app.seen), sent) == ({"trainer"}, [])


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("PUT", "/v1/loras/a/policy", b""),
        ("PUT", "/v1/loras/t", b""),
        ("PUT", "/v1/loras/t/policy", b"mode=finish&p%69n=true"),
        ("PUT", "/v1/loras/t/policy", b"pin"),
        ("PUT", "/v1/loras/t/policy", b"x=%ff&pin"),
        ("PUT", "/v1/loras/v1\n", b""),  # Starlette hands v1 to the route, which the pattern v1? does not cover
        ("GET", "/v1/loras", b""),
        ("POST", "/v1/loras", b""),
        ("POST", "/v1/loras/t/policy/pin", b""),
        ("POST", "/v1/loras/t/policy/refresh", b""),
        ("POST", "/v1/loras/a/policy/pause", b""),
        ("POST", "/v1/load_lora_adapter", b""),
        ("POST", "/v1/load_lora_adapter/t/x", b""),
    ],
)
def test_a_key_that_pushes_may_nothing_else(method: str, path: str, query: bytes) -> None:
    app, sent = ask(TRAINER, method=method, path=path, query_string=query)
    assert (app.seen, sent[0]["status"]) == ([], 403)


def test_a_tenant_over_its_limit_never_reaches_the_app() -> None:
    rates, app = Rates(), App()
    middleware = KnowPrincipal(app, Administrators(POLICY), rates.admit)
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def ask_all() -> None:
        for path, key in [
            ("/tokenize", "key-m"),  # runs no model
            ("/v1/completions", "key-m"),
            ("/v1/chat/completions", "key-n"),
            ("/v1/completions", "key-n"),
            ("/v1/messages", "key-m"),
            ("/v1/completions", "key-a"),
        ]:
            await middleware(scope_of(("authorization", f"Bearer {key}"), path=path), None, send)

    asyncio.run(ask_all())
    assert app.seen == [label for label in ("metered", "metered", "metered", "a") for _ in range(3)]
    refused, of_anthropic = sent[0::2]
    assert (refused["status"], of_anthropic["status"]) == (429, 429)
    assert dict(refused["headers"])[b"retry-after"] == b"30"
    bodies = [json.loads(message["body"]) for message in sent[1::2]]
    assert "[L013]" in bodies[0]["error"]["message"]
    assert [body.get("type") for body in bodies] == [None, "error"]
