"""The commands that change what a server serves, against the admin API's own routes and lifecycle."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lora_plugins.cli import Exit
from lora_plugins.errors import IncompatibleAdapter, SourceUnavailable
from tests.cli.admin_server import KEY, AdminServer, admin_server
from tests.cli.common import Cli, Done, golden, on_terminal

OLD, NEW = "0a", "1b"


@pytest.fixture
def server(cli: Cli) -> Iterator[AdminServer]:
    with admin_server() as running:
        for name in ("sql", "team/sql", "team/poet"):
            running.publish(name, OLD)
        cli.env = {"LORA_PLUGINS_URL": running.url, "LORA_PLUGINS_ADMIN_KEY": KEY}
        yield running


def steady(server: AdminServer, done: Done) -> Done:
    out = re.sub(r"\b(\d+) ms", "<t> ms", done.out.replace(server.url, "<url>"))
    out = re.sub(r'("lora_id"|"elapsed_ms"): [\d.]+', r"\1: <number>", out)
    return Done(done.code, re.sub(r" +", " ", out), done.err.replace(server.url, "<url>"))


def served(cli: Cli) -> dict[str, dict]:
    return {view["lora_name"]: view for view in cli("ls", "--server", "--json").json["loras"]}


def test_a_day_of_one_adapter(cli, server):
    """Golden: what people see of each command."""
    commands = [
        ["load", "team/sql"],
        ["load", "team/sql"],
        ["refresh", "team/sql"],
        ["publish"],
        ["refresh", "team/sql"],
        ["rollback", "team/sql"],
        ["pin", "team/sql"],
        ["unpin", "team/sql"],
        ["prefetch", "team/sql"],
        ["pause", "team/sql", "--mode", "abort"],
        ["resume", "team/sql"],
        ["resume", "team/sql"],
        ["unload", "team/sql"],
        ["unload", "team/sql"],
    ]
    shown = []
    for command in commands:
        if command == ["publish"]:
            server.publish("team/sql", NEW)
            continue
        done = steady(server, cli(*command))
        shown.append(f"$ {' '.join(command)}\n{done.out}{done.err}[{done.code}]\n")
    golden("changes.txt", Done(0, "".join(shown), ""), cli.root)


def test_json_has_an_answer_for_each_name(cli, server):
    cli("load", "sql")
    server.publish("sql", NEW)
    done = cli("refresh", "sql", "team/none", "--json")
    assert (done.code, done.err) == (Exit.NOT_FOUND, "")
    golden("refresh.json", steady(server, done), cli.root)


def test_one_that_fails_does_not_stop_the_others(cli, server):
    server.has["team/sql"] = IncompatibleAdapter("rank 64", expected="at most 16", remedy="raise --max-lora-rank")
    server.has["down"] = SourceUnavailable("no answer of S3")
    done = cli("load", "team/sql", "nobody", "sql", "down", "team/poet")
    assert done.code == Exit.UNAVAILABLE, "the worst of 1, 3 and 4"
    assert done.err.splitlines() == [
        "error: [L003] adapter 'team/sql': found rank 64; expected at most 16. To fix: raise --max-lora-rank.",
        *[line for line in done.err.splitlines() if "[L002] adapter 'nobody'" in line],
        "error: [L006] adapter 'down': found no answer of S3.",
    ]
    assert set(served(cli)) == {"sql", "team/poet"}
    assert cli("load", "sql", "team/sql").code == Exit.WRONG


def test_patterns_are_matched_against_what_is_served(cli, server):
    cli("load", "sql", "team/sql", "team/poet")
    assert cli("pin", "team/*").code == Exit.OK
    assert {name for name, view in served(cli).items() if view["pinned"]} == {"team/sql", "team/poet"}
    assert cli("unload", "*sql").code == Exit.OK
    assert set(served(cli)) == {"team/poet"}
    done = cli("unload", "x*", "team/poet")
    assert (done.code, served(cli)) == (Exit.NOT_FOUND, {})
    assert "adapter 'x*': found no adapter that matches; expected one of the 1 names" in done.err


def test_a_pattern_is_a_name_to_load(cli, server):
    done = cli("load", "team/*")
    assert done.code == Exit.NOT_FOUND
    assert "adapter 'team/*'" in done.err


def test_names_and_uris_come_from_a_file(cli, server):
    server.has["s3://b/one"] = server.has["sql"]
    file = cli.root / "names.txt"
    file.write_text("# mine\n\nfirst\ts3://b/one\n team/sql \nteam/sql\n")
    done = cli("load", "--file", file, "--json")
    assert done.code == Exit.OK
    assert [one["lora_name"] for one in done.json["adapters"]] == ["first", "team/sql"]
    assert sorted(server.world.resolver.asked) == ["s3://b/one", "team/sql"]
    assert cli("unload", "--file", file).code == Exit.OK
    assert served(cli) == {}
    assert cli("load", "other", "--uri", "s3://b/one").code == Exit.OK
    assert set(served(cli)) == {"other"}


def test_a_key_is_taken_from_the_environment_and_never_shown(cli, server):
    cli.env["VLLM_API_KEY"] = "of-vllm"
    assert cli("load", "sql").code == Exit.OK, "the admin key goes first"
    cli.env["LORA_PLUGINS_ADMIN_KEY"] = "stale-secret"
    done = cli("unload", "sql")
    assert (done.code, "denies access (HTTP 403: another key)" in done.err) == (Exit.UNAVAILABLE, True)
    assert "stale-secret" not in done.out + done.err
    del cli.env["LORA_PLUGINS_ADMIN_KEY"], cli.env["VLLM_API_KEY"]
    assert "denies access (HTTP 401: no key" in cli("unload", "sql").err


def test_quiet_prints_errors_only(cli, server):
    done = cli("load", "sql", "nobody", "--quiet")
    assert (done.code, done.out) == (Exit.NOT_FOUND, "")
    assert len(done.err.splitlines()) == 1
    assert cli("unload", "-q", "sql").out == ""


def test_a_bar_counts_many_names_on_a_terminal(cli, server):
    names = [f"many/{number}" for number in range(12)]
    for name in names:
        server.publish(name, OLD)
    terminal = {"TERM": "xterm", "COLUMNS": "80"}
    shown = on_terminal(cli, "load", *names, env=terminal)
    assert re.search(r"\d+/12", shown)
    assert "/12" not in on_terminal(cli, "prefetch", *names, "--quiet", env=terminal)
