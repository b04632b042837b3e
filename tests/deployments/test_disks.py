"""A store whose disk fills, becomes read-only, is unmounted or renamed while a server uses it: what is loaded goes on.

One slot and two places in host memory, so that adapters are read from the store again and again. Torch may compile, and
prefixes are not cached: as little as possible hides what the store does.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import Answer, complete, connect
from testbed.models import PROMPT, edit_config
from testbed.server import Server
from tests.deployments.quiet import assert_quiet
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

pytestmark = pytest.mark.nightly

HOST_PLACES = 2


@dataclass(frozen=True)
class Disk:
    """A server, and the mount that its store lies on: 16 megabytes."""

    server: Server
    client: openai.OpenAI
    bed: Bed
    root: Path
    device: Path
    mount: Path

    def ask(self, name: str) -> Answer:
        return complete(self.client, name, PROMPT, MAX_TOKENS)

    def assert_right(self, name: str, original: str) -> None:
        answer = self.ask(name)
        assert (answer.status, answer.error) == (200, ""), name
        assert list(answer.token_ids) == self.bed.answers[original], name

    def assert_refused(self, name: str, status: int, code: str) -> None:
        body = {"model": name, "prompt": PROMPT, "max_tokens": 1}
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=LONGEST_S)
        assert (answer.status_code, f"[{code}]" in answer.text) == (status, True), answer.text
        assert ("retry-after" in answer.headers) == (status == 503), answer.headers
        assert str(self.mount) not in answer.text, "clients see no paths"

    def call(self, method: str, path: str, **params: Any) -> httpx.Response:
        return httpx.request(method, f"{self.server.url}{path}", params=params, timeout=LONGEST_S)

    def publish(self, name: str, original: str, number: int) -> str:
        target = self.root / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.bed.adapters / original, target)
        edit_config(target, revision=f"{name}{number}")
        return name

    def push_out(self) -> None:
        """Ask for as many others as host memory has places."""
        for name in ("sql", "stable", "team/poet")[: HOST_PLACES + 1]:
            self.assert_right(name, name)


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@pytest.fixture(scope="module")
def disk(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    home = tmp_path_factory.mktemp("disks")
    shutil.copytree(bed.adapters, home / "adapters")
    device, mount = home / "device", home / "store"
    device.mkdir()
    mount.mkdir()
    with contextlib.ExitStack() as stack:
        for command, place in (
            (("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", device), device),
            (("mount", "--bind", device, mount), mount),
        ):
            try:
                run(*command)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip("needs the right to mount a tmpfs")
            stack.callback(subprocess.run, ["umount", "-l", str(place)], check=False, capture_output=True)
        server = stack.enter_context(admin_server(
            bed, home, "--max-loras", "1", "--max-cpu-loras", str(HOST_PLACES), "--no-enforce-eager",
            "--no-enable-prefix-caching", LORA_PLUGINS_ABSENT_TTL_S="0", LORA_PLUGINS_FETCH_TIMEOUT_S="20",
            LORA_PLUGINS_STORE_MAX_BYTES="100MB",  # more than the disk has: it is full before
        ))  # fmt: skip
        yield Disk(server, connect(server), bed, home / "adapters", device, mount)


@pytest.fixture(autouse=True)
def everything_ends(disk: Disk) -> Iterator[None]:
    disk.push_out()  # all are in the store
    yield
    assert_quiet(disk.server)


def assert_goes_on(disk: Disk) -> None:
    """All that is served answers as before, whatever became of the store since."""
    for _ in range(2):
        disk.push_out()


@pytest.mark.deployment(
    "torch.compile", "vllm", "its CPU platform turns compilation off with LoRA (mode NONE); answers are PEFT's"
)
@pytest.mark.deployment("--max-loras 1", "tested", "five adapters through one slot")
@pytest.mark.deployment("prefix caching on and off", "tested", "off, with a swap")
def test_one_slot_without_cache_nor_eager_mode_equals_peft(disk: Disk) -> None:
    for name in ("sql", "chat", "stable", "team/poet") * 2:
        disk.assert_right(name, name)
    for number, original in enumerate(("sql", "chat", "sql")):
        disk.publish("swapped", original, number)
        assert number == 0 or disk.call("POST", "/v1/loras/swapped/refresh").status_code == 200
        for _ in range(2):
            disk.assert_right("swapped", original)
    log = disk.server.log()
    assert "enforce_eager=False" in log
    assert "<CompilationMode.NONE: 0>" in log
    assert disk.call("DELETE", "/v1/loras/swapped").status_code == 200


@pytest.mark.deployment("n > 1", "tested", "each of four answers is PEFT's, over four adapters and one slot")
def test_each_of_several_answers_equals_peft(disk: Disk) -> None:
    """Sampled of the best token only, as vLLM refuses several greedy answers."""
    names = ["sql", "chat", "stable", "team/poet"]
    more = {"n": 4, "temperature": 1.0, "top_p": 1e-6, "ignore_eos": True, "return_token_ids": True}

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=disk.server.url, timeout=LONGEST_S) as client:
            bodies = ({"model": name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, **more} for name in names)
            return list(await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)))

    for name, answer in zip(names, asyncio.run(run()), strict=True):
        assert answer.status_code == 200, answer.text
        assert [choice["token_ids"] for choice in answer.json()["choices"]] == [disk.bed.answers[name]] * 4, name


@pytest.mark.deployment("full disk", "tested", "L004 (507) for what must be fetched; all others go on")
def test_a_full_disk_refuses_only_what_must_be_fetched(disk: Disk) -> None:
    disk.publish("updated", "sql", 1)
    disk.assert_right("updated", "sql")
    filler = disk.device / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        disk.publish("new", "chat", 1)
        disk.assert_refused("new", 507, "L004")
        disk.publish("updated", "chat", 2)
        refused = disk.call("POST", "/v1/loras/updated/refresh")
        assert (refused.status_code, "[L004]" in refused.text) == (507, True), refused.text
        assert_goes_on(disk)
        disk.assert_right("updated", "sql")
    finally:
        filler.unlink()
    disk.assert_right("new", "chat")
    assert disk.call("POST", "/v1/loras/updated/refresh").status_code == 200
    disk.assert_right("updated", "chat")


@pytest.mark.deployment(
    "store on a read-only file system", "tested", "while serving: L006 (503) for what must be fetched; all others go on"
)
def test_a_store_that_becomes_read_only_goes_on(disk: Disk) -> None:
    disk.publish("new-ro", "chat", 1)
    run("mount", "-o", "remount,ro,bind", disk.mount)
    try:
        disk.assert_refused("new-ro", 503, "L006")
        assert_goes_on(disk)
        unloaded = disk.call("DELETE", "/v1/loras/sql")
        assert unloaded.status_code == 200, unloaded.text
        disk.assert_refused("sql", 503, "L006")
    finally:
        run("mount", "-o", "remount,rw,bind", disk.mount)
    for name, original in (("new-ro", "chat"), ("sql", "sql")):
        disk.assert_right(name, original)


@pytest.mark.deployment(
    "store on an unmounted file system",
    "tested",
    "while serving: L006 (503) or fetched again below it; what is loaded goes on",
)
@pytest.mark.parametrize("how", ["unmounted", "removed"])
def test_a_store_that_vanishes_comes_back(disk: Disk, how: str) -> None:
    """Its mount point stays, or nothing does. A worker may fetch again into what it finds there."""
    new = disk.publish(f"new-{how}", "chat", 1)
    loaded = "team/poet"
    disk.assert_right(loaded, loaded)
    run("umount", "-l", disk.mount)
    if how == "removed":
        disk.mount.rmdir()
    try:
        for _ in range(2):
            disk.assert_right(loaded, loaded)
            disk.assert_refused(new, 503, "L006")
        for name in ("sql", "stable"):
            answer = disk.ask(name)
            assert list(answer.token_ids) == disk.bed.answers[name] or answer.error.startswith("[L006]"), answer
        disk.assert_right(loaded, loaded)
    finally:
        shutil.rmtree(disk.mount, ignore_errors=True)  # what the worker has made
        disk.mount.mkdir()
        run("mount", "--bind", disk.device, disk.mount)
    disk.assert_right(new, "chat")
    assert_goes_on(disk)


@pytest.mark.deployment("store on a read-only file system", "refused", "at start: L007")
def test_no_server_starts_on_a_read_only_store(disk: Disk, bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    run("mount", "-o", "remount,ro,bind", disk.mount)
    try:
        with (
            pytest.raises(RuntimeError, match="vllm serve ended") as ended,
            admin_server(bed, tmp_path, LORA_PLUGINS_STORE_DIR=str(disk.mount)),
        ):
            pass
    finally:
        run("mount", "-o", "remount,rw,bind", disk.mount)
    assert f"[L007] found a store below {disk.mount} that answers 'Read-only file system'" in str(ended.value)
