"""`doctor --url` beside a server with our routes and metrics, and the verdict at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lora_plugins.cli import Exit
from lora_plugins.cli.doctor import verdict
from lora_plugins.errors import SourceUnavailable
from lora_plugins.findings import State, Step
from tests.cli.admin_server import KEY, AdminServer, admin_server
from tests.cli.common import Cli

ALL = "lora_filesystem_resolver,lora_lru_manager,lora_admin"


@pytest.fixture
def server(cli: Cli) -> Iterator[AdminServer]:
    with admin_server() as running:
        cli.env |= {"LORA_PLUGINS_ADMIN_KEY": KEY, "VLLM_PLUGINS": ALL}
        yield running


def said(cli: Cli, url: str) -> tuple[int, list[str]]:
    done = cli("doctor", "--no-network", "--url", url, "--json")
    done.assert_no_traceback()
    return done.code, [
        f"{item['state']}: {item['found']}" for item in done.json["findings"] if item["check"] == "server"
    ]


def test_a_server_as_this_environment_would_make_it(cli, server):
    code, lines = said(cli, server.url)
    assert code == Exit.OK
    assert lines[0].startswith(f"ok: {server.url} is vLLM 0.3")
    assert lines[1:] == [
        "ok: lora_lru_manager runs, as in this environment",
        "ok: lora_admin runs, as in this environment",
        "ok: 0 adapters listed",
    ]


def test_what_the_server_has_and_this_environment_does_not_name(cli, server):
    cli.env["VLLM_PLUGINS"] = "lora_filesystem_resolver"
    del cli.env["LORA_PLUGINS_ADMIN_KEY"]
    _, lines = said(cli, server.url)
    assert "warning: lora_lru_manager runs, and this environment does not name it" in lines
    assert "warning: lora_admin runs, and this environment does not name it" in lines
    assert any(line.startswith("problem: a server at") and "denies access" in line for line in lines)


def test_adapters_with_errors_and_in_another_store_are_named(cli, server):
    server.publish("sql", "0a")
    cli("load", "sql", "--url", server.url)
    server.has["sql"] = SourceUnavailable("no answer of S3")
    cli("refresh", "sql", "--url", server.url)
    _, lines = said(cli, server.url)
    assert [line for line in lines if "no answer of S3" in line]
    assert f"warning: its adapters lie in /store, and this environment's store is {cli.store}" in lines


def test_a_flag_that_makes_requests_wait_is_named(cli, server):
    server.world.engine.planner.stats.short_of = "--max-loras"
    _, lines = said(cli, server.url)
    assert "warning: requests have waited for others' adapters, while memory was left" in lines
    assert cli("ls", "--server", "--url", server.url, "--json").json["short_of"] == "--max-loras"


def test_a_server_that_is_not_there_is_a_problem(cli):
    code, lines = said(cli, "http://127.0.0.1:1")
    assert (code, len(lines)) == (Exit.WRONG, 1)
    assert "problem: no answer from http://127.0.0.1:1" in lines[0]


def test_metrics_that_are_off_are_no_verdict_on_plugins(cli):
    with admin_server(key=None, metrics=False) as running:
        _, lines = said(cli, running.url)
    assert any(line.startswith("warning: /metrics: ") for line in lines)
    assert "warning: lora_admin runs, and this environment does not name it" in lines


VERDICTS = {
    "nothing is named": ({"VLLM_PLUGINS": None}, "nothing is served by lora-plugins: set VLLM_PLUGINS"),
    "no source": (
        {"VLLM_PLUGINS": "lora_kernels"},
        "nothing is served by lora-plugins by name: VLLM_PLUGINS names no source of adapters",
    ),
    "one source": ({}, "adapters are served by name from filesystem; without the admin API"),
    "all of it": ({"VLLM_PLUGINS": ALL}, "adapters are served by name from filesystem; with the admin API"),
    "everything": (
        {"VLLM_PLUGINS": "lora_plugins"},
        "adapters are served by name from filesystem; with the admin API",
    ),
    "an empty root": (
        {"VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT/empty"},
        "no adapter was found in filesystem; without the admin API",
    ),
    "a wrong variable": (
        {"LORA_PLUGINS_STORE_MAX_BYTES": "much"},
        "not all that is asked for is served: first mend 'settings'",
    ),
    "vLLM asks nobody": (
        {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"},
        "not all that is asked for is served: first mend 'runtime'",
    ),
}


@pytest.mark.parametrize("kind", VERDICTS)
def test_the_last_line_is_a_verdict(cli, kind):
    changes, sentence = VERDICTS[kind]
    (cli.root / "empty").mkdir()
    cli.env |= {name: text.replace("ROOT", str(cli.root)) for name, text in changes.items() if text is not None}
    for name in (name for name, value in changes.items() if value is None):
        del cli.env[name]
    assert cli("doctor", "--no-network").out.splitlines()[-1] == sentence
    assert cli("doctor", "--no-network", "--json").json["verdict"] == sentence


def test_without_vllm_nothing_is_served():
    found = [Step("vllm", State.PROBLEM, "vLLM is not installed beside lora-plugins", "pip install vllm")]
    assert verdict(found, {"VLLM_PLUGINS": ALL}) == (
        "nothing is served by lora-plugins: vLLM is not installed beside lora-plugins"
    )
