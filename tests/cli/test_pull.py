"""What `pull` says of what it cannot find, and what replicas that pull at once have in their stores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_plugins.adapter.chat import GENERATION_FILE
from lora_plugins.cli import Exit
from testbed.proxy import fault_proxy
from testbed.s3 import S3, s3_server
from tests.cli.common import outside
from tests.make import CHAT, adapter_files, content, put


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        server.bucket("adapters").put_many("sql", adapter_files())
        yield server


def pulled_at_once(s3: S3, stores: Sequence[Path]) -> tuple[list[dict[str, object]], int]:
    """What a process with each of these stores says that it has pulled, and how often the weights were sent."""
    with fault_proxy(s3.url) as proxy:
        env = {"VLLM_PLUGINS": "lora_s3_resolver", "S3_PATH_TEMPLATE": "s3://adapters/{lora_name}"}

        def pull(store: Path) -> dict[str, object]:
            own = {**env, **s3.env(proxy.url), "LORA_PLUGINS_STORE_DIR": str(store)}
            return dict(outside("pull", "sql", "--json", env=own).only)

        with ThreadPoolExecutor(len(stores)) as threads:
            answers = list(threads.map(pull, stores))
        return answers, proxy.bytes_sent("adapter_model") // len(adapter_files()["adapter_model.safetensors"])


def test_replicas_that_share_nothing_have_the_same_version(s3, tmp_path):
    answers, asked = pulled_at_once(s3, (tmp_path / "one", tmp_path / "two"))
    assert answers[0]["digest"] == answers[1]["digest"]
    paths = [Path(str(answer["path"])) for answer in answers]
    assert paths[0] != paths[1]
    assert [path.name for path in paths] == [answers[0]["digest"]] * 2
    ours, theirs = (content(path) for path in paths)
    assert ours == theirs == adapter_files()
    assert (paths[0] / "adapter_config.json").read_bytes() == (paths[1] / "adapter_config.json").read_bytes()
    assert asked == 2


def test_replicas_that_share_a_store_fetch_once(s3, tmp_path):
    answers, asked = pulled_at_once(s3, (tmp_path / "shared",) * 3)
    assert len({answer["path"] for answer in answers}) == 1
    assert asked == 1


def test_files_for_chats_that_cannot_be_used_are_warned_of(cli):
    put(cli.adapters / "odd", {**adapter_files(), GENERATION_FILE: b'{"eos_token_id": "1"}'})
    done = cli("inspect", cli("pull", "odd", "--json").json["adapters"][0]["path"])
    said = "not used of the adapter's files for chats: eos_token_id of generation_config.json ('1'; expected the id of"
    assert f"warning      {said}" in done.out


def test_files_for_chats_are_pulled_and_shown(cli):
    put(cli.adapters / "chat", {**adapter_files(), **CHAT})
    path = Path(cli("pull", "chat", "--json").only["path"])
    assert content(path) == {**adapter_files(), **CHAT}
    said = cli("inspect", path, "--json").only
    assert said["chat"] == {"template": True, "eos_token": "</s>", "end_ids": [2], "added_tokens": {"<a>": 3}}
    assert {file["name"] for file in said["files"]} == {*adapter_files(), *CHAT}
    brought = "a template, eos token </s>, end ids 2, 1 added token with the base model's: '<a>' (3)"
    assert f"chat         {brought}\n" in cli("inspect", path).out
    cli.env["LORA_PLUGINS_ADAPTER_CHAT"] = "base"
    assert "chat         nothing of its own\n" in cli("inspect", path).out
    assert content(Path(cli("pull", "chat", "--json").only["path"])) == adapter_files()


def test_pulling_leaves_no_lease(cli):
    cli("pull", "sql")
    cli("why", "team/poet")
    assert [row["leases"] for row in cli("ls", "--json").json["adapters"]] == [0, 0]


def test_a_uri_on_the_command_line_is_allowed(cli):
    link = cli.root / "elsewhere" / "link"
    link.parent.mkdir()
    os.symlink(cli.adapters / "sql", link)
    assert cli("pull", f"file://{cli.adapters}/sql", "--json").only["uri"] == f"file://{cli.adapters}/sql"
    done = cli("pull", f"file://{link}")
    assert (done.code, "a symlink that leaves the adapter root" in done.err) == (Exit.WRONG, True)


def test_pull_of_a_path_says_the_uri_of_it(cli):
    done = cli("pull", cli.adapters / "sql")
    assert done.code == Exit.NOT_FOUND
    assert f"To fix: for a directory of this machine use {(cli.adapters / 'sql').as_uri()}." in done.err
    assert cli("pull", (cli.adapters / "sql").as_uri()).code == Exit.OK


def test_pull_below_no_home_is_a_name_not_found(cli, monkeypatch):
    """As of a user ID that has no home."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    done = cli("pull", "~/../sql")
    assert (done.code, "use file:///" in done.err) == (Exit.NOT_FOUND, True), done.err


def test_pull_of_an_unknown_name_says_where_it_looked(cli):
    done = cli("pull", "team/Poet")
    assert done.code == Exit.NOT_FOUND
    assert f"no such adapter: filesystem: {cli.adapters / 'team/Poet'}: no such directory" in done.err


def test_pull_of_a_uri_says_what_lies_there(cli):
    (cli.adapters / "run" / "checkpoint-5").mkdir(parents=True)
    for name, said in (("nobody", "no such directory"), ("run", "a directory without adapter files")):
        done = cli("pull", (cli.adapters / name).as_uri())
        assert done.code == Exit.NOT_FOUND
        assert f"found no adapter at this URI: {cli.adapters / name}: {said};" in done.err


def test_uris_of_one_name_keep_their_own_answers(cli):
    uris = [(cli.adapters / name).as_uri() for name in ("nobody", "nothing")]
    names = cli.root / "names"
    names.write_text("".join(f"sql {uri}\n" for uri in uris))
    done = cli("pull", "--file", names, "--json")
    said = [adapter["error"]["found"] for adapter in done.json["adapters"]]
    assert said == [
        f"no adapter at this URI: {cli.adapters / name}: no such directory" for name in ("nobody", "nothing")
    ]
