"""`lora_admin` polls its sources, serves after a restart what it served before, and needs the manager."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from lora_plugins.cli import Exit
from lora_plugins.cli.commands import run
from lora_plugins.lifecycle.served_file import ServedFile
from testbed.bed import Bed
from testbed.client import connect
from testbed.server import Server
from tests.e2e.admin import Admin, serving
from tests.e2e.standing_still import seen


def swapped_by_the_poller(admin: Admin, name: str, original: str) -> None:
    async def answers_as_it() -> bool:
        return list((await asyncio.to_thread(admin.ask, name)).token_ids) == admin.bed.answers[original]

    asyncio.run(seen(answers_as_it))


async def is_written(store: Path, names: set[str], pinned: set[str]) -> bool:
    """Whether the next server could serve these, and those pinned."""
    served = [one for path in store.glob(".served/*.json") for one in ServedFile(path).read()]
    return ({one.name for one in served}, {one.name for one in served if one.is_pinned}) == (names, pinned)


def test_the_poller_swaps_and_a_restart_serves_what_was_served(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path
    for name in ("sql", "chat"):
        shutil.copytree(bed.adapters / name, home / "adapters" / name)
    (home / "allowed").mkdir()
    shutil.copytree(bed.adapters / "stable", home / "allowed" / "there")
    uri = (home / "allowed" / "there").as_uri()
    with serving(bed, home, LORA_PLUGINS_PRELOAD="sql,nobody", LORA_PLUGINS_REFRESH_S="0.5") as server:
        first = Admin(server, connect(server), bed, home / "adapters", home / "allowed")
        assert set(first.view("sql")["tiers"]) == {"store", "host", "slot"}, "there before the server is ready"
        assert "Adapter 'nobody' is not served from the start" in server.log()
        first.publish("sql", "chat", 5)
        swapped_by_the_poller(first, "sql", "chat")
        first.done("POST", "/v1/loras/sql/rollback")
        first.done("POST", "/v1/loras", {"lora_name": "kept", "source": {"uri": uri}})
        first.done("POST", "/v1/loras/kept/pin")
        first.answers_like("chat", "chat")
        for number, original in enumerate(("stable", "chat")):  # between the two it has looked at all
            first.publish("chat", original, number)
            swapped_by_the_poller(first, "chat", original)
        first.answers_like("sql", "sql")
        by_path = shutil.copytree(bed.adapters / "sql", home / "by-path")
        load = {"lora_name": "by-path", "lora_path": str(by_path)}
        assert first.call("POST", "/v1/load_lora_adapter", load).status_code == 200
        first.publish("versioned", "sql", 8)
        first.answers_like("versioned", "sql")
        by_digest = f"versioned@{first.view('versioned')['digest'][:12]}"
        first.answers_like(by_digest, "sql")
        first.done("DELETE", "/v1/loras/versioned")
        names = {"sql", "kept", "chat", "by-path", by_digest}
        asyncio.run(seen(lambda: is_written(home / "store", names, pinned={"kept"})))
    shutil.rmtree(home / "adapters" / "versioned")  # only the store has it
    with monkeypatch.context() as patch:
        patch.setenv("LORA_PLUGINS_STORE_DIR", str(home / "store"))
        assert run(["gc", "--max-bytes", "0"]) == Exit.NO_ROOM, "it removes nothing of that"
    shutil.copytree(bed.adapters / "chat", by_path, dirs_exist_ok=True)
    weights = home / "adapters" / "chat" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])  # a trainer was stopped while it wrote
    with serving(bed, home, LORA_PLUGINS_RESTORE="1", LORA_PLUGINS_REFRESH_S="0.5") as server:
        second = Admin(server, connect(server), bed, home / "adapters", home / "allowed")
        second.answers_like("chat", "chat")  # as the last server did; the source's version is broken
        asyncio.run(seen(lambda: asyncio.to_thread(lambda: "L005" in str(second.view("chat")["last_error"]))))
        second.publish("chat", "stable", 2)
        swapped_by_the_poller(second, "chat", "stable")
        assert second.view("chat")["last_error"] is None
        assert {"sql", "kept"} <= {view["lora_name"] for view in second.done("GET", "/v1/loras")["loras"]}
        assert second.view("kept")["pinned"]
        assert second.view("kept")["uri"] == uri
        second.answers_like("kept", "stable")
        second.answers_like("sql", "sql")  # rolled back, also after the restart
        second.done("POST", "/v1/loras/sql/refresh")
        second.answers_like("sql", "chat")
        assert second.view(by_digest)["state"] == "serving", "before anybody has asked"
        for name in (by_digest, "by-path"):
            second.answers_like(name, "sql")
        assert second.done("POST", "/v1/loras/by-path/refresh")["swapped"]
        second.answers_like("by-path", "chat")


def test_a_declared_set_is_served_and_follows_its_file(bed: Bed, tmp_path: Path) -> None:
    for folder in ("adapters", "allowed"):
        (tmp_path / folder).mkdir()
    for name in ("sql", "chat"):
        shutil.copytree(bed.adapters / name, tmp_path / "allowed" / name)
    file, uris = tmp_path / "adapters.yaml", (tmp_path / "allowed").as_uri()

    def declare(text: str) -> None:
        beside = file.with_name("beside")
        beside.write_text(text)
        beside.replace(file)

    declare(f"adapters:\n- {{name: main, uri: '{uris}/sql', pin: true, preload: true}}\n- {{name: nobody}}\n")
    with serving(bed, tmp_path, LORA_PLUGINS_ADAPTERS_FILE=str(file)) as server:
        admin = Admin(server, connect(server), bed, tmp_path / "adapters", tmp_path / "allowed")
        assert admin.view("main")["pinned"], "served before the server is ready"
        admin.answers_like("main", "sql")
        adapter, absent = admin.done("GET", "/v1/loras")["declared"]["loras"]
        assert (adapter["state"], absent["state"]) == ("served", "failed")
        assert "[L002]" in absent["error"]
        declare("adapters: [")

        async def is_refused() -> bool:
            return bool((await asyncio.to_thread(admin.done, "GET", "/v1/loras"))["declared"]["file_error"])

        asyncio.run(seen(is_refused))
        admin.answers_like("main", "sql")
        declare(f"adapters:\n- {{name: main, uri: '{uris}/chat'}}\n")
        swapped_by_the_poller(admin, "main", "chat")
        declare("adapters: []\n")

        async def is_unloaded() -> bool:
            return await asyncio.to_thread(admin.engine_is_free_of, "main")

        asyncio.run(seen(is_unloaded))
        assert "lora_plugins_declared_file_errors_total 1.0" in admin.call("GET", "/metrics").text


def _size_bytes(adapter: Path) -> int:
    return sum((adapter / name).stat().st_size for name in ("adapter_config.json", "adapter_model.safetensors"))


def test_a_rollback_lasts_where_nothing_else_is_restored(bed: Bed, tmp_path: Path) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text("adapters:\n- {name: declared}\n")
    for name in ("sql", "declared", "other"):
        shutil.copytree(bed.adapters / "sql", tmp_path / "adapters" / name)
    settings = {"LORA_PLUGINS_ADAPTERS_FILE": str(file), "LORA_PLUGINS_REFRESH_S": "0.5"}
    with serving(bed, tmp_path, **settings) as server:
        first = Admin(server, connect(server), bed, tmp_path / "adapters", tmp_path)
        first.answers_like("other", "sql")
        for name in ("sql", "declared"):
            first.answers_like(name, "sql")
            sizes_bytes = [first.view(name)["size_bytes"]]
            first.publish(name, "chat", 1)
            swapped_by_the_poller(first, name, "chat")
            first.done("POST", f"/v1/loras/{name}/rollback")
            sizes_bytes.append(first.view(name)["size_bytes"])
            first.answers_like(name, "sql")
            assert {*sizes_bytes, first.view(name)["size_bytes"]} == {_size_bytes(bed.adapters / "sql")}
    with serving(bed, tmp_path, **settings) as server:
        second = Admin(server, connect(server), bed, tmp_path / "adapters", tmp_path)
        assert second.engine_is_free_of("other"), "only a rollback is restored"
        for name in ("sql", "declared"):
            second.answers_like(name, "sql")
            assert second.view(name)["pinned_digest"], "no poll goes on to the version at the source"
            assert second.done("POST", f"/v1/loras/{name}/refresh")["swapped"]
            second.answers_like(name, "chat")
            assert second.view(name)["pinned_digest"] is None, "a refresh has ended it"


def test_startup_fails_without_the_manager(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    with (
        pytest.raises(RuntimeError, match=r"L007.*lora_admin and without lora_lru_manager"),
        serving(bed, tmp_path, VLLM_PLUGINS="lora_filesystem_resolver,lora_admin"),
    ):
        pass


@pytest.mark.nightly  # tests/lifecycle/test_served_file.py: each replica has a list of its own
def test_replicas_of_a_store_restore_each_its_own(bed: Bed, tmp_path: Path) -> None:
    for name in ("sql", "chat"):
        shutil.copytree(bed.adapters / name, tmp_path / "adapters" / name)

    def names(server: Server) -> set[str]:
        admin = Admin(server, connect(server), bed, tmp_path / "adapters", tmp_path)
        return {view["lora_name"] for view in admin.done("GET", "/v1/loras")["loras"]}

    for replica, name in (("lora-0", "sql"), ("lora-1", "chat")):
        with serving(bed, tmp_path, LORA_PLUGINS_REPLICA=replica, LORA_PLUGINS_PRELOAD=name) as server:
            assert names(server) == {name}
            asyncio.run(seen(lambda name=name: is_in_a_list(tmp_path / "store", name)))
    with serving(bed, tmp_path, LORA_PLUGINS_REPLICA="lora-0", LORA_PLUGINS_RESTORE="1") as server:
        assert names(server) == {"sql"}


async def is_in_a_list(store: Path, name: str) -> bool:
    return any(f'"{name}"' in file.read_text() for file in store.glob(".served/*.json"))
