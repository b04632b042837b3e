"""`ls --server`: servers that answer, deny, lack the admin API, talk nonsense, or are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lora_plugins.api.http_errors import body_of
from lora_plugins.errors import NotAllowed
from tests.cli.admin_server import admin_server
from tests.cli.common import golden
from tests.http_server import Answer, Asked, http_server

ADAPTER = {
    "lora_name": "team/sql",
    "lora_id": 1,
    "state": "serving",
    "source": "s3",
    "uri": "s3://adapters/team/sql",
    "version": "v" * 64,
    "digest": "ab" * 32,
    "path": "/store/" + "ab" * 32,
    "size_bytes": 25_300_000,
    "rank": 16,
    "tiers": ["store", "host", "slot"],
    "requests_in_flight": 3,
    "requests_held": 2,
    "last_used_at": None,
    "pinned": True,
    "pinned_digest": None,
    "previous_digests": [],
    "last_error": None,
    "chat": None,
    "warnings": [],
}
TROUBLED = {
    **ADAPTER,
    "lora_name": "idle\x1b[31m",
    "state": "blocked",
    "requests_in_flight": 0,
    "requests_held": 0,
    "pinned": False,
    "rank": None,
    "digest": None,
    "last_error": {"code": "L005", "message": "[L005] found no JSON.", "at": 1.0},
}
LIST = {"loras": [TROUBLED, ADAPTER], "count": 2, "is_paused": False, "short_of": "", "declared": None}


class Server:
    """Answers `GET /v1/loras` with what it is told to."""

    def __init__(self) -> None:
        self.url = ""
        self.gives = Answer(LIST)
        self.seen: list[tuple[str, str | None]] = []

    def answer(self, asked: Asked) -> Answer:
        self.seen.append((asked.path, asked.headers["Authorization"]))
        return self.gives


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with http_server(made.answer) as made.url:
        yield made


def shown(cli, server, *arguments):
    done = cli("ls", "--server", "--url", server.url, *arguments)
    done.assert_no_traceback()
    return type(done)(done.code, done.out.replace(server.url, "<url>"), done.err.replace(server.url, "<url>"))


def test_a_table_with_what_is_busy_first(cli, server):
    golden("ls-server.txt", shown(cli, server), cli.root)


def test_a_narrow_terminal_gets_the_columns_that_matter_most(cli, server):
    cli.env["COLUMNS"] = "60"
    done = shown(cli, server)
    assert max(map(len, done.out.splitlines()[1:])) <= 60
    golden("ls-server-narrow.txt", done, cli.root)


def test_json_is_the_admin_apis_own(cli, server):
    assert shown(cli, server, "--json").json == LIST


def test_the_key_is_that_of_the_environment(cli, server):
    cli.env["VLLM_API_KEY"] = "from-environment"
    shown(cli, server)
    assert server.seen == [("/v1/loras", "Bearer from-environment")]
    cli.env["LORA_PLUGINS_ADMIN_KEY"] = "of-administrators"
    shown(cli, server)
    assert server.seen[-1] == ("/v1/loras", "Bearer of-administrators")
    del cli.env["VLLM_API_KEY"], cli.env["LORA_PLUGINS_ADMIN_KEY"]
    shown(cli, server)
    assert server.seen[-1] == ("/v1/loras", None)


def test_an_openai_base_url_will_do(cli, server):
    assert cli("ls", "--server", "--url", f"{server.url}/v1/").code == 0
    assert server.seen[-1][0].partition("?")[0] == "/v1/loras"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b"", "denies access (HTTP 401)"),
        (403, b"", "denies access (HTTP 403)"),
        (404, b"", "name lora_admin and lora_lru_manager in the server's VLLM_PLUGINS"),
        (500, b"", "answers HTTP 500"),
        (200, b"<html>", "no list of adapters"),
        (200, b'{"object": "list", "data": []}', "no list of adapters"),
    ],
)
def test_what_a_server_may_answer_instead(cli, server, status, body, says):
    server.gives = Answer(body, status)
    cli.env["LORA_PLUGINS_ADMIN_KEY"] = "secret-key"
    done = shown(cli, server)
    assert (done.code, done.out) == (4, "")
    assert says in done.err
    assert "secret-key" not in done.err
    error = shown(cli, server, "--json").json["error"]
    assert (error["code"], error["kind"]) == ("L006", "SourceUnavailable")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://nobody.invalid:1", "http://127.0.0.1:99999"])
def test_nobody_there(cli, url):
    done = cli("ls", "--server", "--url", url)
    done.assert_no_traceback()
    assert done.code == 4
    assert "no answer from" in done.err


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://[::1", ""])
def test_no_address_of_a_server(cli, url):
    done = cli("ls", "--server", "--url", url)
    done.assert_no_traceback()
    assert done.code == 2


@pytest.mark.parametrize(("key", "says"), [("stale", "the key is wrong"), (None, "no key was sent")])
def test_a_wrong_key_is_called_wrong(cli, key, says):
    """The admin API's own rule of access."""
    if key is not None:
        cli.env["LORA_PLUGINS_ADMIN_KEY"] = key
    with admin_server() as running:
        done = cli("ls", "--server", "--url", running.url)
    assert (done.code, says in done.err, "machine" in done.err) == (4, True, False)
    assert "set LORA_PLUGINS_ADMIN_KEY to the server's" in done.err


def test_a_server_without_keys_says_who_may_ask(cli, server):
    """A proxy's call counts as one from elsewhere."""
    expected = "one on the server's own machine, as the server has no key for its admin API"
    refusal = NotAllowed(
        "a call that a proxy has passed on",
        expected=expected,
        remedy="set LORA_PLUGINS_ADMIN_KEY for the server, and send it",
    )
    server.gives = Answer(body_of(refusal), 403)
    done = cli("ls", "--server", "--url", server.url)
    assert "set LORA_PLUGINS_ADMIN_KEY for the server, and send it" in done.err
