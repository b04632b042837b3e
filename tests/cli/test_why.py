"""`why` beside a running server: the admin API's own routes and lifecycle, and what the sources say of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lora_plugins.cli import Exit
from lora_plugins.errors import SourceUnavailable
from lora_plugins.lifecycle.reconciler import Target
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.store.blocked_names import Blocks
from lora_plugins.store.layout import Layout
from tests.cli.admin_server import KEY, AdminServer, admin_server
from tests.cli.common import Cli
from tests.lifecycle.world import Version

OLD, NEW = "0a", "1b"


@pytest.fixture
def server(cli: Cli) -> Iterator[AdminServer]:
    with admin_server() as running:
        running.publish("team/served", OLD)
        cli.env |= {"LORA_PLUGINS_URL": running.url, "LORA_PLUGINS_ADMIN_KEY": KEY}
        assert cli("load", "team/served").code == Exit.OK
        yield running


def steps(cli: Cli, *arguments: str) -> dict[str, dict[str, str]]:
    return {step["step"]: step for step in cli("why", *arguments, "--json").only["steps"]}


def test_a_served_name_has_version_and_place(cli, server):
    done = cli("why", "team/served")
    assert (done.code, done.err) == (Exit.OK, "")
    assert done.out.splitlines()[-1] == f"team/served: served, version {(OLD * 6)} from s3://adapters/team/served"
    found = cli("why", "team/served", "--json").only
    assert (found["verdict"], found["server"]["digest"], found["server"]["state"]) == ("served", OLD * 32, "serving")
    assert [step["step"] for step in found["steps"]] == ["name", "server", "version"], "no source was asked"
    assert not cli.store.exists(), "and nothing was fetched"


def test_without_the_server_the_sources_decide(cli, server):
    done = cli("why", "team/served", "--no-server")
    assert (done.code, server.url in done.out) == (Exit.NOT_FOUND, False)


def test_what_the_server_lacks_is_asked_of_sources(cli, server):
    done = cli("why", "sql", "--dry-run", "--json")
    assert (done.code, done.only["verdict"], done.only["server"]) == (Exit.OK, "found", None)
    verdicts = {step["step"]: step["verdict"] for step in done.only["steps"]}
    assert (verdicts["server"], verdicts["filesystem"]) == ("no", "yes")


def test_a_question_says_first_that_it_fetches(cli, server):
    assert f"fetching into {cli.store}" in cli("why", "sql").err
    assert cli("why", "sql").err == "", "the store has it"
    assert cli("why", "team/poet", "--dry-run").err == cli("why", "nobody").err == ""
    assert [row["name"] for row in cli("ls", "--json").json["adapters"]] == ["sql"]


@pytest.mark.parametrize("where", ["server", "a server alone", "sources"])
def test_a_misspelt_name_meets_near_names(cli, server, where):
    if where == "a server alone":
        del cli.env["VLLM_PLUGINS"]
    options = ["--no-server"] if where == "sources" else []
    misspelt, near = ("team/poett", "team/poet") if where == "sources" else ("team/servd", "team/served")
    found = steps(cli, misspelt, *options)["spelling"]
    assert (found["verdict"], found["detail"]) == ("warning", f"perhaps a name like '{near}' was meant")
    assert cli("why", misspelt, *options, "--json").only["verdict"] in ("unknown", "not asked")


@pytest.mark.parametrize("name", ["sql", "nobody"])
def test_a_name_of_a_source_or_like_none_meets_none(cli, server, name):
    server.publish("sqk", OLD)
    assert cli("load", "sqk").code == Exit.OK
    assert "spelling" not in steps(cli, name, "--dry-run")


def test_a_refresh_that_failed_is_a_warning(cli, server):
    server.has["team/served"] = SourceUnavailable("no answer of S3")
    assert cli("refresh", "team/served").code == Exit.UNAVAILABLE
    error = steps(cli, "team/served")["error"]
    assert (error["verdict"], "no answer of S3" in error["detail"]) == ("warning", True)
    done = cli("why", "team/served")
    assert (done.code, done.out.splitlines()[-1].endswith(", with a warning above")) == (Exit.OK, True)


def test_a_served_name_gone_from_its_source_is_a_warning(cli, server):
    del server.has["team/served"]
    asyncio.run_coroutine_threadsafe(server.world.lifecycle.poll("team/served"), server.loop).result(60)
    done = cli("why", "team/served")
    assert "no such adapter at its source any more" in done.out
    assert done.out.splitlines()[-1].endswith(", with a warning above")


def test_a_rolled_back_name_says_how_to_go_on(cli, server):
    server.publish("team/served", NEW)
    cli("refresh", "team/served")
    cli("rollback", "team/served")
    done = cli("why", "team/served")
    assert f"stays at {OLD * 6}" in done.out
    assert "→ lora-plugins refresh team/served" in done.out


def test_a_pushed_name_needs_no_refresh(cli, server):
    """A pushed version has no source, so a refresh can only fail."""
    server.has["team/served"] = Version("b" * 64, source="push", uri="push://team/served")
    cli("refresh", "team/served")
    server.world.lifecycle.registry.require("team/served").held_digest = "b" * 64  # as a push leaves the name
    version = steps(cli, "team/served")["version"]
    assert (version["verdict"], "was pushed, until the next push" in version["detail"]) == ("ok", True)
    assert "refresh" not in cli("why", "team/served").out


def test_a_paused_name_says_what_is_needed(cli, server):
    cli("pause", "team/served")
    done = cli("why", "team/served")
    assert (done.code, "→ lora-plugins resume team/served" in done.out) == (Exit.UNAVAILABLE, True)
    assert cli("why", "team/served", "--json").only["verdict"] == "paused"


@pytest.mark.parametrize("where", ["server", "store"])
def test_a_blocked_name_is_refused_until_loaded(cli, server, where):
    if where == "server":
        assert cli("unload", "team/served", "--block").code == Exit.OK
        name = "team/served"
    else:
        layout, name = Layout(cli.store), "sql"
        layout.create()
        blocks = Blocks(layout)
        blocks.hold(name)
        blocks.write(name)
    done = cli("why", name)
    assert (done.code, f"→ lora-plugins load {name}" in done.out) == (Exit.NOT_FOUND, True)
    found = cli("why", name, "--json").only
    assert (found["verdict"], found["error"]["code"]) == ("refused", "L002")
    assert list(steps(cli, name))[-1] == "block", "no source was asked"


def test_a_declared_name_says_why_its_load_failed(cli, server):
    target = Target(DesiredAdapter("sql"))
    target.error = SourceUnavailable("no answer of S3")
    server.app.state.lora_plugins_reconciler = SimpleNamespace(declared={"sql": target}, file_error=None)
    declared = steps(cli, "sql")["declared"]
    assert (declared["verdict"], "no answer of S3" in declared["detail"]) == ("failed", True)


@pytest.mark.parametrize("how", ["no server", "another key"])
def test_without_an_answer_the_sources_are_asked(cli, server, how):
    cli.env["LORA_PLUGINS_URL" if how == "no server" else "LORA_PLUGINS_ADMIN_KEY"] = (
        "http://127.0.0.1:9" if how == "no server" else "stale-secret"
    )
    done = cli("why", "sql", "nobody", "--json")
    assert (done.code, done.err) == (Exit.NOT_FOUND, "")
    for one in done.json["adapters"]:
        server_step = next(step for step in one["steps"] if step["step"] == "server")
        assert server_step["verdict"] == "no answer"
        assert server_step["hint"]
    assert [one["verdict"] for one in done.json["adapters"]] == ["not compared", "unknown"]


def test_a_server_without_the_name_and_no_source_here(cli, server):
    del cli.env["VLLM_PLUGINS"]
    done = cli("why", "sql")
    assert (done.code, "does not serve it" in done.out) == (Exit.SETTINGS, True)
    assert done.out.splitlines()[-1] == "sql: not served now, and this environment names no source to ask"
    assert cli("why", "team/served").code == Exit.OK


@pytest.mark.parametrize("how", [["--dry-run"], []])
def test_no_name_is_found_where_vllm_asks_no_resolver(cli, how):
    del cli.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
    done = cli("why", "sql", "--no-server", *how)
    assert done.code == Exit.WRONG
    assert done.out.splitlines()[-1].endswith("set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")


def test_names_of_all_kinds_in_one_answer(cli, server):
    done = cli("why", "team/served", "sql", "../up", "--json")
    assert [one["verdict"] for one in done.json["adapters"]] == ["served", "not compared", "unknown"]
    assert done.code == Exit.NOT_FOUND


def test_a_mixture_has_its_parts_as_a_step(cli, server):
    found = steps(cli, "sql*0.70+team/poet*-0.3", "--no-server")
    assert found["parts"]["detail"] == "0.7 of sql, -0.3 of team/poet"
    assert found["adapter"]["detail"].startswith("verified: rank ")
    assert cli("why", "sql*0.5+nobody*1").code == Exit.NOT_FOUND
    assert "no adapter 'nobody', a part of the mixture" in cli("why", "sql*0.5+nobody*1").out


def test_a_dry_run_asks_for_a_mixtures_parts(cli, server):
    done = cli("why", "sql*0.7+nobody*1", "--dry-run", "--json")
    assert [(one["name"], one["verdict"]) for one in done.json["adapters"]] == [("nobody", "unknown"), ("sql", "found")]
    assert not cli.store.exists()
