"""Several names, patterns and files of names for `pull`, `why`, `inspect` and `verify`; `rm` and `ls --remote`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_plugins.cli import Exit
from tests.cli.common import golden
from tests.make import adapter_files, put


def names(done, key: str = "name") -> list[str]:
    return [one.get(key) for one in done.json["adapters"]]


def test_pull_brings_what_it_can_and_says_the_rest(many):
    done = many("pull", "sql", "nobody", "cut", "../up", "team/*", "--json")
    assert (done.code, done.err) == (Exit.NOT_FOUND, "")
    assert names(done) == ["sql", "nobody", "cut", "../up", "team/poet", "team/sql"]
    assert [one.get("error", {}).get("code") for one in done.json["adapters"]] == [
        None, "L002", "L005", "L002", None, None,
    ]  # fmt: skip
    assert (done.json["count"], done.json["failed"]) == (6, 3)
    done = many("pull", "sql", "cut")
    assert (done.code, done.out.count("was there"), done.err.count("error:")) == (Exit.WRONG, 1, 1)


@pytest.mark.parametrize(("command", "code"), [("pull", 0), ("why", 7), ("inspect", 7)])
def test_one_name_has_the_json_of_several(many, command, code):
    def asked(name: str) -> Path | str:
        return many.adapters / name if command == "inspect" else name

    done = many(command, asked("sql"), "--json")
    assert (done.code, done.err, done.json["count"], done.json["failed"]) == (code, "", 1, 0)
    assert many(command, asked("sql"), asked("nobody"), "--json").json["adapters"][0].keys() == done.only.keys()


def test_a_file_names_what_to_pull(many, monkeypatch):
    file = many.root / "names"
    file.write_text(f"# of the team\nteam/sql\nmine file://{many.adapters}/sql\n")
    done = many("pull", "--file", file, "--json")
    assert (done.code, names(done)) == (Exit.OK, ["team/sql", "mine"])
    file.write_text("team/sql\n", encoding="utf-8-sig")
    assert names(many("pull", "--file", file, "--json")) == ["team/sql"]
    for text, says in ("\n# none\n", "no names"), ("\n", "nothing in it"):
        file.write_text(text)
        done = many("pull", "--file", file)
        assert (done.code, says in done.err) == (Exit.USAGE, True)


def test_why_goes_on_after_an_error(many):
    done = many("why", "nobody", "cut", "sql")
    assert done.code == Exit.NOT_FOUND
    assert [f"{name}: " in done.out for name in ("nobody", "cut", "sql")] == [True] * 3


def test_inspect_takes_names_of_the_store_and_patterns(many):
    many("pull", "team/sql", "sql")
    assert many("inspect", "team/sql", "--json").only["uri"] == f"file://{many.adapters}/team/sql"
    assert len(many("inspect", "*sql", "--json").json["adapters"]) == 2
    found = many("inspect", f"{many.adapters}/team/*", "--json").json["adapters"]
    assert [Path(one["path"]).name for one in found] == ["poet", "sql"]


def test_verify_takes_names_and_patterns(many):
    digests = {one["name"]: one["digest"] for one in many("pull", "team/*", "sql", "--json").json["adapters"]}
    done = many("verify", "team/*", "none", "--json")
    assert {one.get("digest") for one in done.json["adapters"]} == {digests["team/poet"], digests["team/sql"], None}
    (fault,) = [one for one in done.json["adapters"] if "error" in one]
    assert (done.code, fault["name"], fault["error"]["code"]) == (Exit.NOT_FOUND, "none", "L002")
    assert (done.json["count"], done.json["failed"]) == (3, 1)
    assert many("verify", "sql", digests["team/sql"][:8], "--json").json["count"] == 2


@pytest.mark.parametrize("how", ["txt", "json"])
def test_a_dry_run_fetches_nothing(many, how):
    more = ["--json"] if how == "json" else []
    golden(f"why-dry-run.{how}", many("why", "sql", "nobody", "--dry-run", *more), many.root)
    assert not many.store.exists()


def test_a_dry_run_refuses_what_would_not_be_fetched(many):
    many.env["LORA_PLUGINS_MAX_ADAPTER_BYTES"] = "1kB"
    done = many("why", "sql", "--dry-run", "--json")
    assert (done.code, done.only["error"]["code"], done.only["verdict"]) == (Exit.WRONG, "L005", "refused")
    assert not many.store.exists()
    del many.env["LORA_PLUGINS_MAX_ADAPTER_BYTES"]
    path = many("pull", "sql", "--json").only["path"]
    assert many("why", "sql", "--dry-run", "--json").only["located"]["stored"] == path


@pytest.mark.parametrize("how", ["txt", "json"])
def test_ls_remote_lists_what_sources_have(many, how):
    many("pull", "sql")
    put(many.adapters / "sql" / "checkpoint-500", adapter_files())
    put(many.adapters / ".hidden", adapter_files())
    outside = put(many.root / "outside", adapter_files())
    os.symlink(outside, many.adapters / "link-out")
    os.symlink(many.adapters / "team", many.adapters / "link-in")
    os.symlink(many.adapters / "sql", many.adapters / "other")
    golden(f"ls-remote.{how}", many("ls", "--remote", *(["--json"] if how == "json" else [])), many.root)


def test_inspect_says_no_adapter_among_the_verdicts(many):
    empty = many.root / "empty"
    empty.mkdir()
    done = many("inspect", "/no/such", many.adapters / "cut", empty, many.adapters / "sql")
    assert done.code == Exit.NOT_FOUND
    verdicts = [row for row in done.out.splitlines() if row.startswith("verdict")]
    assert verdicts == [
        "verdict      no adapter",
        "verdict      would be refused",
        "verdict      would be refused",
        "verdict      whole, and not compared: no base model was given (--base-model)",
    ]
    assert "adapter      /no/such" in done.out.splitlines()
    assert done.err.count("error: [L") == 3
    for named in ("/no/such", many.adapters / "cut", empty):
        assert f"'{named}'" in done.err
    found = many("inspect", f"{many.adapters}/*", "--json").json["adapters"]
    assert {one["verdict"] for one in found} == {"refused", "not compared"}
    assert many("inspect", "/no/such", "--json").only["verdict"] == "no adapter"
    assert {one["error"]["adapter"] for one in found if "error" in one} == {
        str(many.adapters / name) for name in ("cut", "team")
    }
