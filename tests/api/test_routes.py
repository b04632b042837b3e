"""The admin routes over HTTP: what `If-Match` may say, and that everything else changes nothing."""

from __future__ import annotations

import asyncio
import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import ValidationError

from lora_plugins.adapter.chat import GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_FILE
from lora_plugins.adapter.names import MIN_PREFIX
from lora_plugins.api.access.policy import Policy
from lora_plugins.api.models import RollbackRequest
from lora_plugins.errors import LoRAPluginsError, SlowBody, SourceUnavailable, error_of
from lora_plugins.lifecycle.arrivals import Body
from lora_plugins.lifecycle.lifecycle import Lifecycle
from lora_plugins.lifecycle.pushing import Pushes, Receive, ServedPush
from lora_plugins.store.blocked_names import Blocks
from tests.api.access.test_principals import POLICY
from tests.api.test_push_body import ONE_FILE, archive, digest_header
from tests.cli.admin_server import KEY, AdminServer, admin_server
from tests.make import CHAT, adapter_files

OLD, NEW = "aa" * 32, "bb" * 32


TRAINER_KEY = "trainer-key"
TRAINERS = Policy.parse(f"""
[tenants.trainer]
keys = ["{TRAINER_KEY}"]
adapters = []
pushes = ["sql-*"]
""")


@pytest.fixture(scope="module")
def server() -> Iterator[AdminServer]:
    with admin_server(policy=TRAINERS, metrics=False) as running, httpx.Client(timeout=60) as client:
        client.base_url, running.client = running.url, client
        yield running


def asked(
    server: AdminServer, method: str, path: str, *if_match: str, key: str = KEY, **more: Any
) -> tuple[int, str, httpx.Response]:
    headers = [("Authorization", f"Bearer {key}"), *(("If-Match", text) for text in if_match)]
    answer = server.client.request(method, f"/v1/loras{path}", headers=headers, **more)
    return answer.status_code, answer.text, answer


def post(server: AdminServer, path: str, *if_match: str, **more: Any) -> tuple[int, str]:
    return asked(server, "POST", path, *if_match, **more)[:2]


def load(server: AdminServer, name: str, *if_match: str) -> tuple[int, str]:
    return post(server, "", *if_match, json={"lora_name": name})


@pytest.fixture
def name(server: AdminServer, request: pytest.FixtureRequest) -> str:
    """An adapter that is served as OLD, with NEW at its source."""
    name = f"sql-{abs(hash(request.node.name))}"
    server.publish(name, "a")
    assert load(server, name)[0] == 200
    server.publish(name, "b")
    return name


@pytest.mark.parametrize("text", [OLD, f'"{OLD}"', "*"])
def test_the_served_digest_and_a_star_match(server, name, text):
    for other in (NEW, f'"{NEW}"'):
        status, said = post(server, f"/{name}/refresh", other)
        assert (status, "[L010]" in said, OLD in said) == (412, True, True)
    status, said = post(server, f"/{name}/refresh", text)
    assert (status, NEW in said) == (200, True)


QUOTING = ['""', '"', f'"{OLD[:12]}"', f'W/"{OLD}"', f'"{OLD}', f'{OLD}"', '"*"']
WRONG = ["", OLD[:12], OLD.upper(), f"{OLD}, {NEW}", "undefined", *QUOTING]


@pytest.mark.parametrize("change", ["load", "refresh", "rollback"])
def test_what_is_no_digest_is_refused(server, name, change):
    path, body = ("", {"lora_name": name}) if change == "load" else (f"/{name}/{change}", None)
    for texts in (*((text,) for text in WRONG), (OLD, NEW), (OLD, OLD)):
        status, said = post(server, path, *texts, json=body)
        assert (status, "found If-Match:" in said) == (400, True), texts
    assert post(server, f"/{name}/refresh", OLD)[0] == 200, "nothing has changed"


def test_a_pusher_rolls_back_to_versions_of_its_name(server, name):
    others, absent = "cc" * 32, "dd" * 32
    server.publish("operators", "c")
    assert load(server, "operators")[0] == 200
    assert post(server, f"/{name}/refresh")[0] == 200

    def roll_back(digest: str, key: str) -> tuple[int, str]:
        return post(server, f"/{name}/rollback", json={"digest": digest}, key=key)

    refused = roll_back(others, TRAINER_KEY)
    assert (refused[0], "[L002]" in refused[1]) == (404, True)
    assert refused == roll_back(absent, TRAINER_KEY)
    assert roll_back(OLD, TRAINER_KEY)[0] == roll_back(NEW, TRAINER_KEY)[0] == 200
    assert roll_back(others, KEY)[0] == 200
    assert (roll_back(NEW, KEY)[0], roll_back(others, TRAINER_KEY)[0]) == (200, 200), "the name has had it now"


def test_a_pusher_blocks_served_names_only(server, name):
    def block(blocked: str, key: str) -> tuple[int, bool]:
        status, *_ = asked(server, "DELETE", f"/{blocked}?block=true", key=key)
        return status, blocked in server.world.lifecycle.registry.blocked

    assert block(f"{name}-unknown", TRAINER_KEY) == (404, False)
    assert block(name, TRAINER_KEY) == (200, True)
    assert block(f"{name}-unknown", KEY) == (200, True)


class _Pushes(Pushes):
    """Receives a body as `Pushes` does, with a directory outside the store."""

    def __init__(self, lifecycle: Lifecycle, directory: Path) -> None:
        super().__init__(lifecycle)
        self.lifecycle, self.directory = lifecycle, directory
        self.received: set[str] = set()

    async def push(self, name: str, body: Body, receive: Receive, **options: Any) -> ServedPush:  # type: ignore[override]
        with TemporaryDirectory(dir=self.directory) as directory:
            _, left_out = await receive(body.pieces, Path(directory))
            self.received = {path.name for path in Path(directory).iterdir()}
        change = await self.lifecycle.take(name, SimpleNamespace(name=name), **options)  # type: ignore[arg-type]
        return ServedPush(change, 0, 0, 0, left_out)


@pytest.fixture
def put(server: AdminServer, name: str, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Push an adapter as NEW."""
    server.app.state.lora_plugins_pushes = _Pushes(server.world.lifecycle, tmp_path)

    def put(query: str = "", *content_digests: str) -> tuple[int, str]:
        headers = [("Authorization", f"Bearer {KEY}"), *(("Content-Digest", text) for text in content_digests)]
        answer = httpx.put(f"{server.url}/v1/loras/{name}{query}", headers=headers, content=ONE_FILE)
        return answer.status_code, answer.text

    return put


@pytest.mark.parametrize(("query", "pins"), [("", False), ("?pin=false", False), ("?pin=true", True), ("?pin", True)])
def test_a_push_pins_when_asked(server, put, name, query, pins):
    status, said = put(query)
    assert (status, NEW in said, server.world.lifecycle.registry.require(name).is_pinned) == (200, True, pins)


def test_all_lines_of_content_digest_are_compared(put):
    right, wrong = digest_header(ONE_FILE, "sha-256"), digest_header(b"", "sha-512")
    assert put("", right, digest_header(ONE_FILE, "sha-512"))[0] == 200
    status, said = put("", right, wrong)
    assert (status, "another sha-512" in said) == (400, True)


def test_a_client_that_leaves_costs_one_line_of_the_log(server, put, name, caplog):
    del put
    lines, errors = logging.getLogger("vllm.lora_plugins"), logging.getLogger("uvicorn.error")
    for logger in (lines, errors):
        logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, lines.name):
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
            connection.putrequest("PUT", f"/v1/loras/{name}")
            connection.putheader("Authorization", f"Bearer {KEY}")
            connection.putheader("Content-Length", str(len(ONE_FILE)))
            connection.endheaders(ONE_FILE[:100])
            time.sleep(0.3)
            connection.close()
            deadline = time.monotonic() + 30
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)  # for what else may be logged
    finally:
        for logger in (lines, errors):
            logger.removeHandler(caplog.handler)
    said = {record.getMessage() for record in caplog.records if record.exc_info or record.name == lines.name}
    assert said == {f"The client of a push of adapter '{name}' left before the end of the body"}


def test_a_template_in_a_tenants_push_is_left_out(tmp_path):
    """A template runs in the server, for as long as the template likes."""
    with admin_server(policy=POLICY, metrics=False) as server:
        server.publish("t/sql", "a")
        pushes = server.app.state.lora_plugins_pushes = _Pushes(server.world.lifecycle, tmp_path)

        def put(key: str) -> str:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/x-tar"}
            body = archive({**adapter_files(), **CHAT})
            answer = httpx.put(f"{server.url}/v1/loras/t/sql", headers=headers, content=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["message"]

        assert "without" not in put("key-root")
        assert {TEMPLATE_FILE, TOKENIZER_FILE, GENERATION_FILE} <= pushes.received
        left_out = ", ".join(sorted({*CHAT} - {GENERATION_FILE}))
        said = f"without {left_out}, which only administrators may bring"
        assert said in put("key-t")
        assert pushes.received & CHAT.keys() == {GENERATION_FILE}


def test_a_slow_body_gets_408(server, name, monkeypatch):
    pushes = Failing(server.world.lifecycle, SlowBody("a body of which 1 bytes have come"))
    monkeypatch.setattr(server.app.state, "lora_plugins_pushes", pushes, raising=False)
    status, said, _ = asked(server, "PUT", f"/{name}", content=ONE_FILE)
    assert (status, "[L012]" in said) == (408, True)


class Failing(Pushes):
    """Pushes and rollbacks that end with an error, as a file system far below may end them."""

    def __init__(self, lifecycle: Lifecycle, error: LoRAPluginsError) -> None:
        super().__init__(lifecycle)
        self.error = error

    async def push(self, *_: Any, **__: Any) -> ServedPush:
        raise self.error

    def admitted(self, *_: Any) -> Any:
        raise self.error


def broken(adapter: str) -> LoRAPluginsError:
    return SourceUnavailable(
        "no room at '/srv/secret/store/tmp'",
        expected="room below /srv/secret/store",
        remedy="free space in /srv/secret",
        adapter=adapter,
        file="/srv/secret/store/tmp/adapter_model.safetensors",
        place="https://minio.secret:9000",
    )


@pytest.mark.parametrize(("method", "end"), [("PUT", ""), ("POST", "/rollback")])
def test_only_administrators_see_paths_in_errors(server, name, monkeypatch, method, end):
    error = broken(name)
    pushes = Failing(server.world.lifecycle, error)
    monkeypatch.setattr(server.app.state, "lora_plugins_pushes", pushes, raising=False)
    assert post(server, f"/{name}/refresh")[0] == 200, "there is a version to go back to"
    of_pusher, of_administrator = (asked(server, method, f"/{name}{end}", key=key)[2] for key in (TRAINER_KEY, KEY))
    for answer in (of_pusher, of_administrator):
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, str(error.retry_after_s))
        assert answer.json()["error"].keys() == {"message", "type", "param", "code", "lora_plugins"}
        assert answer.json()["error"]["lora_plugins"]["adapter"] == name
    assert error_of(of_administrator.json()["error"]["lora_plugins"]).fields() == error.fields()
    assert of_administrator.json()["error"]["message"] == str(error)
    assert "no room at '<path>'" in of_pusher.json()["error"]["message"]
    assert "secret" not in of_pusher.text


def test_the_last_error_shows_pushers_no_path(server, name):
    server.has[name] = broken(name)
    assert post(server, f"/{name}/refresh")[0] == 503
    shown = [asked(server, "GET", f"/{name}", key=key)[2].json() for key in (TRAINER_KEY, KEY)]
    of_pusher, of_administrator = (it["last_error"]["message"] for it in shown)
    assert ("/srv/secret" in of_administrator, "secret" in of_pusher) == (True, False)
    assert "no room at '<path>'" in of_pusher


def test_an_error_has_its_parts_for_programs(server):
    error = asked(server, "GET", "/nobody")[2].json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("Not Found", 404, None)
    assert error["lora_plugins"] == {
        "code": "L002",
        "kind": "AdapterNotFound",
        "found": "no such adapter",
        "expected": "one that is served",
        "remedy": "see GET /v1/loras",
        "adapter": "nobody",
        "file": "",
        "place": "",
    }


@pytest.mark.parametrize("change", ["pin", "unpin", "prefetch", "refresh", "rollback", "load", "unload", "push"])
def test_an_answered_change_is_written_down(server, put, name, monkeypatch, change):
    assert post(server, f"/{name}/refresh")[0] == 200
    written: list[int] = []

    async def write() -> None:
        await asyncio.sleep(0.1)
        written.append(server.world.written)

    monkeypatch.setattr(server.world.lifecycle, "written", write)
    if change == "unload":
        assert asked(server, "DELETE", f"/{name}")[0] == 200
    elif change == "push":
        assert put()[0] == 200
    elif change == "load":
        assert load(server, name)[0] == 200
    else:
        assert post(server, f"/{name}/{change}")[0] == 200
    assert written == [server.world.written]


def test_a_block_is_on_disk_before_it_is_answered(server, name):
    status, said, _ = asked(server, "DELETE", f"/{name}?block=true")
    assert (status, "unloaded and blocked" in said) == (200, True)
    assert name in Blocks(server.world.resolver.store.layout).names()
    for verb in ("/prefetch", "@main/prefetch", "/pin", "/refresh", "/rollback"):
        status, said = post(server, f"/{name}{verb}")
        assert (status, "[L002]" in said, "blocked" in said) == (404, True, True), verb
    assert (load(server, f"{name}@main")[0], load(server, name)[0]) == (404, 200)
    assert post(server, f"/{name}/prefetch")[0] == 200


def test_a_block_is_answered_while_the_name_is_looked_up(server, name):
    is_held, ended = threading.Event(), threading.Event()

    async def look_up() -> None:
        async with server.world.server.lock(name):
            is_held.set()
            await asyncio.to_thread(ended.wait, 60)

    look = asyncio.run_coroutine_threadsafe(look_up(), server.loop)
    try:
        assert is_held.wait(60)
        status, said, answer = asked(server, "DELETE", f"/{name}?block=true")
        assert (status, "blocked" in said, '"draining"' in said) == (200, True, True)
        assert answer.elapsed.total_seconds() < 1, "the promise of 50 ms is tested in virtual time"
    finally:
        ended.set()
        look.result(60)


@pytest.mark.parametrize("change", ["prefetch", "pin"])
def test_a_prefetch_and_a_pin_of_another_version_change_nothing(server, name, change):
    status, said = post(server, f"/{name}/{change}", NEW)
    assert (status, "[L010]" in said, OLD in said) == (412, True, True)
    assert post(server, f"/{name}/{change}", "undefined")[0] == 400
    assert post(server, f"/{name}/{change}", OLD)[0] == 200
    post(server, f"/{name}/unpin")


@pytest.mark.parametrize("query", ["", "?block=true"])
def test_a_deletion_of_another_version_changes_nothing(server, name, query):
    status, said, _ = asked(server, "DELETE", f"/{name}{query}", NEW)
    assert (status, "[L010]" in said, OLD in said) == (412, True, True)
    assert post(server, f"/{name}/refresh", OLD)[0] == 200, "it is served as before"
    assert asked(server, "DELETE", f"/{name}{query}", NEW)[0] == 200


def test_a_digest_that_is_too_short_is_refused() -> None:
    assert RollbackRequest(digest=OLD[:MIN_PREFIX]).digest == OLD[:MIN_PREFIX]
    with pytest.raises(ValidationError):
        RollbackRequest(digest=OLD[: MIN_PREFIX - 1])
