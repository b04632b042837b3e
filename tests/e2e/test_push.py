"""Adapters that are pushed over HTTP to a real server: PEFT's answers, stamped; all or nothing; nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.numpy import load_file

from lora_plugins.client import PushFailed, push, push_async, wait_served
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import connect
from testbed.models import PROMPT
from tests.e2e.admin import HEADERS, KEY, Admin, serving
from tests.e2e.standing_still import LONGEST_S


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("push")


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    """On a tmpfs, which a trainer on the same host may want; the stores of other tests lie on a disk."""
    assert {it.fstype for it in psutil.disk_partitions(all=True) if it.mountpoint == "/dev/shm"} == {"tmpfs"}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "store"


@pytest.fixture(scope="module")
def admin(bed: Bed, home: Path, store: Path) -> Iterator[Admin]:
    (home / "adapters").mkdir()
    with serving(bed, home, LORA_PLUGINS_RESTORE="1", LORA_PLUGINS_STORE_DIR=str(store)) as server:
        yield Admin(server, connect(server), bed, home / "adapters", home / "allowed")


def pushed(admin: Admin, name: str, original: str, **options: Any) -> str:
    """Push as a trainer does: tensors and configuration; returns the digest."""
    config, tensors = trained(admin, original)
    return push(name, tensors, config, servers=[admin.server.url], key=KEY, **options).digest


def trained(admin: Admin, original: str) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = admin.bed.adapters / original
    return json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")


def asked(admin: Admin, model: str) -> tuple[list[int], str | None]:
    """The answer's tokens, and the digest that its header says."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{admin.server.url}/v1/completions", json=body, headers=HEADERS, timeout=LONGEST_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"], answer.headers.get("x-lora-digest")


def arrived(store: Path) -> list[str]:
    """What lies in the store's folder for what arrives."""
    return os.listdir(store / ".tmp")


def test_each_push_is_a_version_that_answers_by_digest(admin: Admin) -> None:
    digests = {original: pushed(admin, "policy", original) for original in ("sql", "chat", "stable")}
    assert len(set(digests.values())) == 3
    assert asked(admin, "policy") == (admin.bed.answers["stable"], digests["stable"])
    for original, digest in digests.items():
        assert asked(admin, f"policy@{digest}") == (admin.bed.answers[original], digest)
    assert pushed(admin, "policy", "stable") == digests["stable"], "the same bytes are the same version"
    assert admin.view("policy")["source"] == "push"


def put(admin: Admin, name: str, body: bytes, content_type: str = "", **headers: str) -> httpx.Response:
    headers |= HEADERS | ({"Content-Type": content_type} if content_type else {})
    return httpx.put(f"{admin.server.url}/v1/loras/{name}", content=body, headers=headers, timeout=LONGEST_S)


def test_the_answer_says_what_was_swapped_and_when(admin: Admin) -> None:
    first = pushed(admin, "timed", "sql")
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(admin.bed.adapters / "chat", "adapter")
    answer = put(admin, "timed", archive.getvalue(), "application/x-tar").json()
    assert (answer["previous_digest"], answer["swapped"]) == (first, True)
    assert answer["digest"] == admin.view("timed")["digest"]
    timings = answer["timings"]
    assert 0 < sum(timings.values()) <= answer["elapsed_ms"]
    assert timings["received_ms"] > 0 < timings["served_ms"]


@pytest.mark.parametrize("fault", ["no adapter", "cut off", "not finite", "another model's"])
def test_a_push_that_cannot_be_served_changes_and_leaves_nothing(admin: Admin, store: Path, fault: str) -> None:
    served = pushed(admin, "whole", "sql")
    config, tensors = trained(admin, "chat")
    if fault == "no adapter":
        refused = put(admin, "whole", b"\xff" * 100_000)
        assert (refused.status_code, "[L005]" in refused.text) == (400, True)
    elif fault == "cut off":
        with pytest.raises(httpx.HTTPError):
            put_cut_off(admin, "whole")
    else:
        spoil = {
            "not finite": lambda _, it: it * float("nan"),
            "another model's": lambda name, it: it[:, :-1].copy() if "lora_A" in name else it,
        }[fault]
        code = {"not finite": "L005", "another model's": "L003"}[fault]
        with pytest.raises(PushFailed, match=rf"400 .*\[{code}\]"):
            push("whole", {it: spoil(it, tensors[it]) for it in tensors}, config, servers=[admin.server.url], key=KEY)
    assert asked(admin, "whole") == (admin.bed.answers["sql"], served)
    assert admin.view("whole")["previous_digests"] == []

    for _ in range(1000):  # the end of the connection is noticed a moment later
        if not arrived(store):
            return
        httpx.get(f"{admin.server.url}/health", timeout=LONGEST_S)
    raise AssertionError(arrived(store))


def put_cut_off(admin: Admin, name: str) -> None:
    """Announce more than is sent, and go."""

    async def half() -> Any:
        yield (admin.bed.adapters / "chat" / "adapter_model.safetensors").read_bytes()[:500]
        raise httpx.WriteError("the trainer was killed")

    async def send() -> None:
        async with httpx.AsyncClient(timeout=LONGEST_S) as client:
            headers = HEADERS | {"Content-Length": "100000"}
            await client.put(f"{admin.server.url}/v1/loras/{name}", content=half(), headers=headers)

    asyncio.run(send())


def test_of_trainers_that_push_at_once_each_learns_who_won(admin: Admin) -> None:
    before = pushed(admin, "raced", "sql")
    config, tensors = trained(admin, "chat")

    async def race() -> list[Any]:
        bodies = [{name: it * (1 + number / 64) for name, it in tensors.items()} for number in range(8)]
        options: dict[str, Any] = {"servers": [admin.server.url], "key": KEY, "if_match": before}
        pushes = [push_async("raced", body, config, **options) for body in bodies]
        return await asyncio.gather(*pushes, return_exceptions=True)

    outcomes = asyncio.run(race())
    won = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    lost = [str(outcome) for outcome in outcomes if isinstance(outcome, PushFailed)]
    assert (len(won), len(lost)) == (1, 7), outcomes
    assert all("412" in text or "409" in text for text in lost)
    assert admin.view("raced")["digest"] == won[0].digest


def test_two_servers_take_a_push_or_neither_does(admin: Admin) -> None:
    before = pushed(admin, "fanned", "sql")
    config, tensors = trained(admin, "chat")
    with pytest.raises(PushFailed, match="ConnectError") as failed:
        push("fanned", tensors, config, servers=[admin.server.url, "http://127.0.0.1:9"], key=KEY)
    assert list(failed.value.errors) == ["http://127.0.0.1:9"]
    assert asked(admin, "fanned") == (admin.bed.answers["sql"], before)
    wait_served("fanned", before, [admin.server.url], key=KEY)


@pytest.mark.parametrize("name", ["x@main", "../x", "tiny"])
def test_a_name_that_cannot_be_pushed_is_refused(admin: Admin, name: str) -> None:
    assert put(admin, name.replace("/", "%2F"), b"x").status_code in (400, 404)


def test_a_restart_serves_the_newest_whole_push(bed: Bed, home: Path, store: Path, admin: Admin) -> None:
    digest = pushed(admin, "kept", "stable")
    for _ in range(1000):
        if any(digest in path.read_text() for path in store.glob(".served/*.json")):
            break
        httpx.get(f"{admin.server.url}/health", timeout=LONGEST_S)
    with serving(bed, home, LORA_PLUGINS_RESTORE="1", LORA_PLUGINS_STORE_DIR=str(store)) as server:
        again = Admin(server, connect(server), bed, home / "adapters", home / "allowed")
        assert asked(again, "kept") == (bed.answers["stable"], digest)


def test_the_command_line_pushes_a_directory(admin: Admin) -> None:
    folder, environment = str(admin.bed.adapters / "sql"), {**os.environ, "VLLM_API_KEY": KEY}
    program = "from lora_plugins.cli import main; main()"
    command = [sys.executable, "-c", program, "push", folder, "shell", "--url", admin.server.url, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert asked(admin, "shell") == (admin.bed.answers["sql"], json.loads(done.stdout)["adapters"][0]["digest"])
    wrong = subprocess.run([*command, "--if-match", "0" * 64], env=environment, capture_output=True, check=False)
    assert (wrong.returncode, b"L010" in wrong.stdout) == (1, True)
