"""The store as `ls`, `verify`, `gc` and `rm` see it, and what they leave alone."""

from __future__ import annotations

import os
import time
from dataclasses import astuple

import pytest

from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.cli import Exit
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.lifecycle.served_file import ServedFile
from lora_plugins.store.store import Store
from tests.make import adapter_files, put


def in_state(done, state):
    """The digests of a command's adapters in one state."""
    return [row["digest"] for row in done.json["adapters"] if row.get("state") == state]


@pytest.mark.usefixtures("permissions_count")
def test_a_read_only_store_is_listed_and_not_written(cli):
    digest = cli("pull", "sql", "--json").only["digest"]
    folders = [cli.store, *(path for path in cli.store.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        listed = cli("ls", "--json")
        planned = cli("gc", "--dry-run", "--max-bytes", "0", "--json")
        refused = [cli(*command) for command in (["pull", "team/poet"], ["gc", "--max-bytes", "0"])]
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert (listed.code, [row["digest"] for row in listed.json["adapters"]]) == (Exit.OK, [digest])
    assert (planned.code, in_state(planned, "removed")) == (Exit.OK, [digest])
    for done in refused:
        done.assert_no_traceback()
        assert done.code in (Exit.SETTINGS, Exit.UNAVAILABLE)
        assert "Permission denied" in done.err


def test_what_is_damaged_is_marked_and_collected_first(cli):
    other = cli("pull", "team/poet", "--json").only["digest"]
    digest = cli("pull", "sql", "--json").only["digest"]
    weights = cli.store / digest / WEIGHTS_FILE
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = cli("verify", digest[:8], "--json")
    assert (done.code, done.json["adapters"]) == (Exit.WRONG, [{"digest": digest, "whole": False}])
    listed = {row["digest"]: row["damaged"] for row in cli("ls", "--json").json["adapters"]}
    assert listed == {other: False, digest: True}
    gone = cli("gc", "--max-bytes", "3kB", "--json").json["adapters"]
    assert [(row["digest"], row["damaged"], row["state"]) for row in gone] == [(digest, True, "removed")]


def test_what_is_damaged_and_in_use_stays(cli):
    digest = cli("pull", "sql", "--json").only["digest"]
    server = Store(cli.store)
    assert server.acquire(digest)
    (cli.store / digest / WEIGHTS_FILE).unlink()
    done = cli("verify")
    assert (done.code, "damaged: replaced once it is fetched again" in done.out) == (Exit.WRONG, True)
    assert [row["damaged"] for row in cli("ls", "--json").json["adapters"]] == [True]
    assert "(damaged)" in cli("ls").out
    assert in_state(cli("gc", "--max-bytes", "0", "--json"), "removed") == []
    server.leases.release(digest)
    assert in_state(cli("gc", "--max-bytes", "0", "--json"), "removed") == [digest]


def test_gc_leaves_what_a_server_has_leased(cli):
    digest = cli("pull", "sql", "--json").only["digest"]
    other = cli("pull", "team/poet", "--json").only["digest"]
    server = Store(cli.store)
    assert server.acquire(digest)
    assert [row["leases"] for row in cli("ls", "--json").json["adapters"] if row["digest"] == digest] == [1]
    for more in (["--dry-run"], []):
        done = cli("gc", "--max-bytes", "0", "--json", *more)
        assert done.code == Exit.NO_ROOM
        assert in_state(done, "removed") == [other]
        assert in_state(done, "leased") == [digest]
        assert not done.json["fits"]
        assert (cli.store / other).exists() == bool(more)
    server.leases.release(digest)
    assert cli("gc", "--max-bytes", "0").code == Exit.OK
    assert not (cli.store / digest).exists()


@pytest.fixture
def served(cli):
    """The digests of an adapter that a server has served before it ended, and of another one, used later."""
    digests = [cli("pull", name, "--json").only["digest"] for name in ("sql", "team/poet")]
    os.utime(cli.store / ".uses" / digests[0], (1, 1))
    ServedFile.of_store(cli.store, "base", "replica").write(
        map(astuple, [DesiredAdapter("sql", last_digest=digests[0])])
    )
    return digests


def test_gc_keeps_for_the_next_start_what_was_served(cli, served):
    for more in (["--dry-run"], []):
        done = cli("gc", "--max-bytes", "0", "--json", *more)
        assert done.code == Exit.NO_ROOM
        assert in_state(done, "removed") == [served[1]]
        assert in_state(done, "served") == [served[0]]
        assert (cli.store / served[0]).exists()
    assert "served in the last 7 days: --all removes it too" in cli("gc", "--max-bytes", "0").out
    done = cli("gc", "--max-bytes", "0", "--all", "--json")
    assert (done.code, in_state(done, "removed")) == (Exit.OK, [served[0]])


def test_gc_removes_what_was_served_last(cli, served):
    done = cli("gc", "--max-bytes", "3kB", "--all", "--json")
    assert (done.code, in_state(done, "removed")) == (Exit.OK, [served[1]])


def test_gc_keeps_to_the_limit_of_the_store(cli, served):
    cli.env["LORA_PLUGINS_STORE_MAX_BYTES"] = "1kB"
    done = cli("gc", "--json")
    assert (done.code, in_state(done, "removed")) == (Exit.OK, served[::-1])


def test_gc_forgets_what_was_served_long_ago(cli, served):
    (path,) = (cli.store / ".served").iterdir()
    eight_days_ago = time.time() - 8 * 86400
    os.utime(path, (eight_days_ago, eight_days_ago))
    done = cli("gc", "--max-bytes", "0", "--json")
    assert (done.code, in_state(done, "removed")) == (Exit.OK, served)


def test_gc_removes_the_oldest_and_no_more_than_needed(cli):
    put(cli.adapters / "third", adapter_files(lora_alpha=32))
    digests = [cli("pull", name, "--json").only["digest"] for name in ("team/poet", "third", "sql")]
    for age_s, digest in enumerate(reversed(digests)):
        use = cli.store / ".uses" / digest
        os.utime(use, (use.stat().st_atime, time.time() - 100 * age_s))
    assert [row["digest"] for row in cli("ls", "--json").json["adapters"]] == digests[::-1]
    done = cli("gc", "--max-bytes", "5kB", "--json")
    assert in_state(done, "removed") == digests[:1]
    assert done.json["after_bytes"] == sum(row["size_bytes"] for row in cli("ls", "--json").json["adapters"])


def test_rm_removes_by_name_pattern_uri_and_digest(many):
    digests = {one["name"]: one["digest"] for one in many("pull", "*", "--json").json["adapters"] if "digest" in one}
    done = many("rm", "team/*", "--dry-run", "--json")
    assert [one["state"] for one in done.json["adapters"]] == ["removed", "removed"]
    assert many("ls", "--json").json["count"] == 3
    assert many("rm", "team/sql").code == Exit.OK
    assert many("rm", digests["team/poet"][:8]).code == Exit.OK
    assert {row["name"] for row in many("ls", "--json").json["adapters"]} == {"sql"}
    assert many("rm", f"file://{many.adapters}/sql").code == Exit.OK
    done = many("rm", "sql")
    assert (done.code, "no such adapter in the store" in done.err) == (Exit.NOT_FOUND, True)
    assert list(many.store.glob("[0-9a-f]*")) == []


def test_rm_leaves_what_is_leased_and_says_by_whom(many):
    pulled = {one["name"]: one["digest"] for one in many("pull", "sql", "team/sql", "--json").json["adapters"]}
    server = Store(many.store)
    assert server.acquire(pulled["sql"])
    for more in (["--dry-run"], []):
        done = many("rm", "*sql", *more)
        assert done.code == Exit.NO_ROOM
        assert f"stays: leased by process {os.getpid()} of this host" in done.out
        assert (many.store / pulled["team/sql"]).exists() == bool(more)
    assert (many.store / pulled["sql"]).exists()
    server.leases.release(pulled["sql"])
    assert many("rm", "sql").code == Exit.OK
