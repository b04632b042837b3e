"""Model Runner V2 with asynchronous scheduling, as CUDA users run it: one server, its kernels in Triton's interpreter.

`make test-v2` runs the end-to-end files that say most on this runner.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from testbed import drafts, v2_runner
from testbed.bed import MAX_TOKENS, Bed, prepare
from testbed.client import PLAIN_HTTP
from testbed.events import events
from testbed.models import PROMPT, edit_config
from testbed.reference import Reference
from testbed.server import Server
from testbed.trained_tokens import with_tokens
from testbed.vectors import with_biases, with_factors, with_magnitudes
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S
from tests.e2e.test_in_flight import body, tokens_of, view_of
from tests.repetitions import times

SLOTS = 2
LONG_TOKENS = 24
STREAMS = times(8, short=4)
HUGE = "huge"  # its numbers overflow


@dataclass(frozen=True)
class V2:
    """The server, and the root that it serves by name."""

    server: Server
    bed: Bed
    root: Path

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_S, verify=PLAIN_HTTP)

    def answers(self, names: Sequence[str | None]) -> list[list[int]]:
        """What all are answered, asked at once; None is the base model."""

        async def ask() -> list[list[int]]:
            async with self.client() as client:
                return await asyncio.gather(*(tokens_of(client, name or str(self.bed.base)) for name in names))

        return asyncio.run(ask())

    def publish(self, name: str, original: str, number: int = 0) -> None:
        """Put an adapter in the place of what has this name."""
        fresh = self.root / f"fresh-{name}"
        shutil.copytree(self.bed.adapters / original, fresh)
        edit_config(fresh, revision=f"{number}")
        shutil.rmtree(self.root / name, ignore_errors=True)
        fresh.rename(self.root / name)


@contextmanager
def v2_server(home: Path, *arguments: str) -> Iterator[V2]:
    bed = prepare()
    shutil.copytree(bed.adapters, home / "adapters")
    edit_config(shutil.copytree(bed.adapters / "sql", home / "adapters" / HUGE), lora_alpha=1e30)
    environment = {**v2_runner.ENVIRONMENT, "VLLM_LOGGING_LEVEL": "DEBUG", "LORA_PLUGINS_CHECK_FINITE": "0"}
    arguments = (*v2_runner.ARGUMENTS, "--max-loras", f"{SLOTS}", *arguments)
    with admin_server(bed, home, *arguments, **environment) as server:
        yield V2(server, bed, home / "adapters")


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V2]:
    with v2_server(tmp_path_factory.mktemp("v2")) as server:
        yield server


def test_the_server_runs_what_cuda_users_run(v2: V2) -> None:
    for line in (*v2_runner.LOGGED, "Batch queue is enabled with size 2"):
        assert line in v2.server.log()


def test_adapters_of_one_batch_answer_as_peft_does(v2: V2) -> None:
    names = [None, "sql", "chat", "team/poet"] * 2
    assert v2.answers(names) == [v2.bed.answers[name] for name in names]


def test_more_adapters_than_slots_answer_as_peft_does(v2: V2) -> None:
    originals = ("sql", "chat", "team/poet")
    names = {f"many-{number}": originals[number % 3] for number in range(3 * SLOTS)}
    for name, original in names.items():
        v2.publish(name, original)
    assert v2.answers([*names, *names]) == [v2.bed.answers[original] for original in [*names.values()] * 2]


def test_vectors_and_trained_tokens_answer_as_peft_does(v2: V2) -> None:
    """In one batch with plain adapters and the base model; slots change hands between the kinds."""
    plain, root, reference = v2.bed.adapters / "sql", v2.root, Reference(v2.bed.base)
    prompt = reference.prompt_ids(PROMPT)
    with_magnitudes(plain, root / "dora", v2.bed.base)
    with_biases(plain, root / "biases")
    with_factors(plain, root / "ia3", v2.bed.base)
    with_tokens(plain, root / "trained", {"model.embed_tokens": prompt[-3:]}, features=256)
    kinds = ("dora", "biases", "ia3", "trained")
    answers = {**v2.bed.answers, **{name: reference.generate(root / name, prompt, MAX_TOKENS) for name in kinds}}
    assert all(answers[name] != answers["sql"] for name in kinds)
    names = [None, *kinds, "sql", "chat"] * 2
    assert v2.answers(names) == [answers[name] for name in names]


def test_an_adapter_without_numbers_ends_alone(v2: V2) -> None:
    healthy = [None, "sql", "chat", "team/poet"]

    async def ask() -> tuple[httpx.Response, list[list[int]]]:
        async with v2.client() as client:
            refused = asyncio.create_task(client.post("/v1/completions", json=body(HUGE, MAX_TOKENS)))
            answers = await asyncio.gather(*(tokens_of(client, name or str(v2.bed.base)) for name in healthy))
            return await refused, answers

    refused, answers = asyncio.run(ask())
    assert (refused.status_code, "NaN" in refused.text, HUGE in refused.text) == (400, True, True), refused.text
    assert answers == [v2.bed.answers[name] for name in healthy]


async def stream(client: httpx.AsyncClient, name: str) -> tuple[list[int], list[tuple[str, int]]]:
    """The tokens of a streamed answer, and the versions that made the tokens, as the answer's last piece says."""
    tokens, spans = list[int](), list[tuple[str, int]]()
    async with client.stream("POST", "/v1/completions", json=body(name, LONG_TOKENS, stream=True)) as answer:
        assert answer.status_code == 200, await answer.aread()
        spans = [(answer.headers["x-lora-digest"], 0)]
        async for event in events(answer):
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            said = (event.get("kv_transfer_params") or {}).get("lora_versions")
            spans = spans if said is None else [(digest, place) for digest, place in said]
    return tokens, spans


def test_streams_that_move_say_which_version_made_which_tokens(v2: V2) -> None:
    originals = ("sql", "chat")
    v2.publish("moving", originals[0])
    version_of: dict[str, Path] = {}

    async def serve() -> list[tuple[list[int], list[tuple[str, int]]]]:
        answers = []
        async with v2.client() as client:
            await tokens_of(client, "moving")
            digest = (await view_of(client, "moving"))["digest"]
            version_of[digest] = v2.bed.adapters / originals[0]
            for number in range(1, 1 + times(40, short=6)):
                if number % 2:  # each stream meets two moves
                    streams = [asyncio.create_task(stream(client, "moving")) for _ in range(STREAMS)]
                await asyncio.sleep(0.05 * number % 0.4)
                original = originals[number % 2]
                v2.publish("moving", original, number)
                moved = await client.post("/v1/loras/moving/refresh", json={"running": "inflight"})
                version_of[moved.json()["digest"]] = v2.bed.adapters / original
                if not number % 2:
                    answers += await asyncio.gather(*streams)
        return answers

    answers = asyncio.run(serve())
    reference = Reference(v2.bed.base)
    prompt_ids = reference.prompt_ids(PROMPT)
    wrong = []
    for tokens, spans in answers:
        assert len(tokens) == LONG_TOKENS
        missed = reference.spans_missed([(version_of[digest], place) for digest, place in spans], prompt_ids, tokens)
        if missed:
            wrong.append(([place for _, place in spans], missed))
    assert sum(len(spans) > 1 for _, spans in answers) >= STREAMS, "too few have moved"
    assert not wrong, f"{len(wrong)} of {len(answers)}"


@pytest.mark.nightly
def test_streams_that_move_beside_drafts_say_the_same(tmp_path: Path) -> None:
    few = list(range(60, 64))  # the adapters choose next to none of what the draft says: nearly all is rejected later
    draft = {"method": "draft_model", "model": str(drafts.model(prepare().base, tmp_path / "draft", few))}
    with v2_server(tmp_path, "--speculative-config", json.dumps({**draft, "num_speculative_tokens": 3})) as server:
        test_streams_that_move_say_which_version_made_which_tokens(server)


def test_a_pause_stops_one_adapter_and_all_others_run(v2: V2) -> None:
    async def ask() -> None:
        async with v2.client() as client:
            await tokens_of(client, "sql")
            running = asyncio.create_task(tokens_of(client, "sql", LONG_TOKENS))
            await asyncio.sleep(0.2)
            paused = await client.post("/v1/loras/sql/pause", params={"mode": "keep"})
            assert paused.status_code == 200, paused.text
            assert await tokens_of(client, "chat") == v2.bed.answers["chat"]
            assert not running.done()
            assert (await client.post("/v1/loras/sql/resume")).status_code == 200
            assert (await running)[:MAX_TOKENS] == v2.bed.answers["sql"]

    asyncio.run(ask())
