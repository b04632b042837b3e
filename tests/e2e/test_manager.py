"""`lora_lru_manager` in a real server: more adapters than slots and host places, and every answer is PEFT's.

With `lora_kernels`, so that base-model requests may share batches with adapters; `test_parallel.py` runs the
manager with vLLM's kernels.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import Answer, complete, complete_all, connect
from testbed.models import DEMO_ADAPTERS, PROMPT, edit_config
from testbed.server import Server
from tests.e2e.broken import BROKEN
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, lora_server

SLOTS = 2
HOST_PLACES = 3
HOST_MAX_BYTES = 2_600_000  # "wide" and its copies have 2.1 MB each, the others less than 0.6
DEMO_NAMES = [spec.name for spec in DEMO_ADAPTERS]
COPIES = {f"{name}-{copy}": name for name in DEMO_NAMES for copy in ("two", "three")}
ALIKE = {**{name: name for name in DEMO_NAMES}, **COPIES}  # adapter to the one whose answer it gives
FIXED_SEED = 20260731


@dataclass(frozen=True)
class Managed:
    """A server with our manager: two slots that cost a copy, three host places, and the root that it serves from."""

    server: Server
    client: openai.OpenAI
    bed: Bed
    root: Path

    def ask(self, name: str) -> Answer:
        return complete(self.client, name, PROMPT, MAX_TOKENS)

    def assert_right(self, name: str) -> None:
        answer = self.ask(name)
        assert (answer.status, answer.error) == (200, ""), name
        assert list(answer.token_ids) == self.bed.answers[ALIKE[name]], name

    def ask_all(self, names: Sequence[str], at_once: int = 8) -> list[list[int] | int]:
        """Token ids, or the status of a refusal, for each name; `at_once` requests run at any time."""
        return asyncio.run(self.ask_beside(names, at_once))

    async def ask_beside(self, names: Sequence[str], at_once: int) -> list[list[int] | int]:
        """As `ask_all`, for a test that does something else meanwhile."""
        return await complete_all(self.server, names, PROMPT, MAX_TOKENS, at_once=at_once)

    def wrong(self, names: Sequence[str], at_once: int = 8) -> list[tuple[str, list[int] | int]]:
        answers = self.ask_all(names, at_once)
        expected = [self.bed.answers[ALIKE.get(name)] for name in names]  # None for the base model
        return [(name, answer) for name, answer, ids in zip(names, answers, expected, strict=True) if answer != ids]

    def rpc(self, method: str) -> list[Any]:
        answer = httpx.post(f"{self.server.url}/collective_rpc", json={"method": method}, timeout=240)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["results"])

    def stored_at(self, name: str) -> Path:
        return Path({card.id: card for card in self.client.models.list()}[name].root)

    def push_out(self, name: str) -> None:
        """Use as many others as the host cache has places, so that `name` leaves it."""
        others = [other for other in ALIKE if ALIKE[other] != ALIKE[name]]
        for other in others[: HOST_PLACES + 1]:
            self.assert_right(other)


@pytest.fixture(scope="module")
def managed(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    home = tmp_path_factory.mktemp("managed")
    root = home / "adapters"
    for name, original in ALIKE.items():
        shutil.copytree(bed.adapters / original, root / name)
        if name != original:
            edit_config(root / name, revision=name)  # other bytes, so a directory of its own in the store
    shutil.copytree(bed.adapters / "stable", home / "static")
    with lora_server(
        bed,
        home,
        *("--max-loras", str(SLOTS), "--max-cpu-loras", str(HOST_PLACES)),
        *("--lora-modules", f"static={home / 'static'}"),
        plugins=(RESOLVER, MANAGER, KERNELS),
        LORA_PLUGINS_HOST_MAX_BYTES=str(HOST_MAX_BYTES),
        VLLM_SERVER_DEV_MODE="1",  # /collective_rpc
    ) as server:
        yield Managed(server, connect(server), bed, root)


@pytest.fixture(autouse=True)
def engine_lives(managed: Managed) -> Iterator[None]:
    """Whatever a test does, the engine runs afterwards and never crashed."""
    yield
    assert managed.server.process.poll() is None
    assert httpx.get(f"{managed.server.url}/health", timeout=240).status_code == 200
    managed.assert_right("chat")
    log = managed.server.log()
    for sign in ("EngineDeadError", "EngineCore encountered a fatal error", "EngineCore failed"):
        assert sign not in log


@pytest.mark.deployment("one worker", "tested", "more adapters than slots and host places, in random order")
def test_long_random_schedule_equals_peft(managed: Managed) -> None:
    chance = random.Random(FIXED_SEED)
    names = [chance.choice([*ALIKE, str(managed.bed.base)]) for _ in range(160)]
    assert len(set(names)) > HOST_PLACES
    assert managed.wrong(names) == []


def test_vanished_from_the_store_is_fetched_again(managed: Managed) -> None:
    """A worker that lacks the directory brings it from the source, and serves it if its digest is the same."""
    name = "stable-three"
    managed.assert_right(name)
    gone = managed.stored_at(name)
    managed.push_out(name)
    shutil.rmtree(gone)
    names = [name, "sql", "chat", "wide", "team/poet"] * 2
    assert managed.wrong(names) == []
    assert gone.is_dir()


@pytest.mark.parametrize("streaming", [False, True])
def test_one_gone_from_store_and_source_fails_in_isolation(managed: Managed, streaming: bool) -> None:
    name = f"wide-{'three' if streaming else 'two'}"
    managed.assert_right(name)
    gone = managed.stored_at(name)
    managed.push_out(name)
    shutil.rmtree(gone)
    away = managed.root / f"away-{streaming}"
    (managed.root / name).rename(away)
    others = ["sql", "chat", "stable", "team/poet"]

    async def all_at_once() -> tuple[httpx.Response, list[list[int] | int]]:
        async with httpx.AsyncClient(timeout=240) as client:
            running = asyncio.create_task(managed.ask_beside(others, 4))
            body = {"model": name, "prompt": PROMPT, "max_tokens": 4, "stream": streaming}
            refused = await client.post(f"{managed.server.url}/v1/completions", json=body)
            return refused, await running

    refused, answers = asyncio.run(all_at_once())
    assert refused.status_code == 404, refused.text  # before the first byte of a stream
    assert "L002" in refused.text
    assert name in refused.text
    log = managed.server.log()
    assert len(re.findall(rf"WARNING .*Adapter not loaded: .*'{name}'", log)) == 1
    assert "stream generator" not in log, "a traceback of vLLM's for each refused stream"
    assert answers == [managed.bed.answers[other] for other in others]
    away.rename(managed.root / name)
    managed.assert_right(name)


def test_gone_here_and_changed_at_the_source_is_a_swap(managed: Managed) -> None:
    """A worker brings no other bytes under the version's id; the API server swaps to the source's version."""
    name = "poet-other"
    shutil.copytree(managed.bed.adapters / "team/poet", managed.root / name)
    first = managed.ask(name)
    assert first.status == 200
    gone = managed.stored_at(name)
    managed.push_out("team/poet")
    shutil.rmtree(gone)
    shutil.rmtree(managed.root / name)
    shutil.copytree(managed.bed.adapters / "sql", managed.root / name)
    answer = managed.ask(name)
    assert (answer.status, answer.error) == (200, "")
    assert list(answer.token_ids) == managed.bed.answers["sql"]
    assert managed.stored_at(name).name != gone.name


def test_one_broken_in_the_engine_fails_in_isolation(managed: Managed, tmp_path: Path) -> None:
    """Loaded by hand, past the resolver's checks, while others run."""
    kind = "wrong-shapes"
    directory = tmp_path / kind
    shutil.copytree(managed.bed.adapters / "sql", directory)
    next(case for case in BROKEN if case.name == kind).make(directory)
    others = ["chat", "wide", "stable", "team/poet"] * 2

    async def both() -> tuple[httpx.Response, list[list[int] | int]]:
        async with httpx.AsyncClient(timeout=240) as client:
            body = {"lora_name": f"by-hand-{kind}", "lora_path": str(directory)}
            running = asyncio.create_task(managed.ask_beside(others, 4))
            loaded = await client.post(f"{managed.server.url}/v1/load_lora_adapter", json=body)
            return loaded, await running

    loaded, answers = asyncio.run(both())
    assert loaded.status_code == 400, loaded.text
    assert f"by-hand-{kind}" in loaded.text
    assert "[L00" in loaded.text
    assert answers == [managed.bed.answers[name] for name in others]
    assert managed.ask(f"by-hand-{kind}").status == 404


def test_a_static_module_is_served_and_loaded_again(managed: Managed) -> None:
    for _ in range(2):
        assert list(managed.ask("static").token_ids) == managed.bed.answers["stable"]
        managed.push_out("stable")
    directory = managed.stored_at("static")
    directory.rename(directory.with_name("away"))  # no source has it
    assert list(managed.ask("static").token_ids) == managed.bed.answers["stable"]
    directory.with_name("away").rename(directory)
