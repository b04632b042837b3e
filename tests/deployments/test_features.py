"""vLLM's other features beside adapters, all in one server: each answer is PEFT's for the adapter that it names.

The server speculates with n-grams, divides prompts, preempts (its KV cache is tiny), and schedules by priority; two
adapters run at once, of five.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.decoding import Decoding
from testbed.models import DEMO_ADAPTERS, PROMPT, edit_config
from testbed.reference import Reference
from testbed.server import Server
from tests.deployments.quiet import assert_quiet, metric
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S, in_state, is_held, seen

NAMES = [spec.name for spec in DEMO_ADAPTERS]
NIGHTLY = pytest.mark.nightly
BATCHED_TOKENS = 64
LONG_TOKENS = 90
HOST_MAX_BYTES = 2_700_000  # room for "wide" with "sql" or "chat", not with both
PAUSED_TOKENS = 120  # of two requests: no more than the KV cache takes, as a pause does not wait for preempted ones
LONG_PROMPT = " ".join(f"{PROMPT} the lazy dog {number}." for number in range(12))
FIXED = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True)
class Features:
    """The server, PEFT's answers, and the root that it serves."""

    server: Server
    bed: Bed
    reference: Reference
    root: Path

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_S)

    def expected(self, name: str, prompt: str, tokens: int) -> list[int]:
        return self.reference.generate(self.bed.adapters / name, self.reference.prompt_ids(prompt), tokens)

    def decoding(self, name: str) -> Decoding:
        return Decoding(self.reference, self.bed.adapters / name)

    def publish(self, name: str, original: str, number: int) -> None:
        target = self.root / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.bed.adapters / original, target)
        edit_config(target, revision=f"{number}")


@pytest.fixture(scope="module")
def features(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Features]:
    home = tmp_path_factory.mktemp("features")
    shutil.copytree(bed.adapters, home / "adapters")
    speculation = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    with admin_server(
        bed, home, "--max-loras", "2", "--max-model-len", "256", "--max-num-batched-tokens", str(BATCHED_TOKENS),
        "--block-size", "32", "--num-gpu-blocks-override", "12", "--scheduling-policy", "priority",
        "--speculative-config", speculation, "--max-num-seqs", "8", LORA_PLUGINS_HOST_MAX_BYTES=str(HOST_MAX_BYTES),
    ) as server:  # fmt: skip
        yield Features(server, bed, Reference(bed.base), home / "adapters")


@pytest.fixture(autouse=True)
def everything_ends(features: Features) -> Iterator[None]:
    yield
    assert_quiet(features.server)


async def choices(client: httpx.AsyncClient, name: str, prompt: str, tokens: int, **more: Any) -> list[list[int]]:
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, **FIXED, **more}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


async def ids_of(client: httpx.AsyncClient, name: str, prompt: str, tokens: int, **more: Any) -> list[int]:
    (ids,) = await choices(client, name, prompt, tokens, **more)
    return ids


def answered(features: Features, requests: Iterable[dict[str, Any]]) -> list[list[int]]:
    """The tokens of each, asked for at once."""

    async def run() -> list[list[int]]:
        async with features.client() as client:
            return list(await asyncio.gather(*(ids_of(client, **request) for request in requests)))

    return asyncio.run(run())


@pytest.mark.deployment(
    "speculative decoding",
    "tested",
    "n-grams, greedy, over five adapters in two slots; sampling beside it: known limits",
)
def test_speculated_tokens_are_those_of_peft(features: Features) -> None:
    """Of a few tokens only, so that n-grams come again: the tiny model repeats nothing by itself."""
    few, asked = list(range(60, 68)), NAMES * 2
    prompt_ids = features.reference.prompt_ids(PROMPT)
    expected = {name: features.decoding(name).among(prompt_ids, 40, few) for name in NAMES}
    limits = {"prompt": PROMPT, "tokens": 40, "allowed_token_ids": few}
    assert answered(features, ({"name": name, **limits} for name in asked)) == [expected[name] for name in asked]
    assert metric(features.server, "vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.deployment("chunked prefill", "tested", "prompts longer than a step's tokens, of several adapters at once")
def test_divided_prompts_are_answered_as_by_peft(features: Features) -> None:
    assert len(features.reference.prompt_ids(LONG_PROMPT)) > 2 * BATCHED_TOKENS
    answers = answered(features, ({"name": name, "prompt": LONG_PROMPT, "tokens": 8} for name in NAMES * 2))
    assert answers == [features.expected(name, LONG_PROMPT, 8) for name in NAMES * 2]


@pytest.mark.deployment("preemption, tiny KV cache", "tested", "with speculation, chunked prefill, priorities")
def test_preempted_requests_of_two_adapters_equal_peft(features: Features) -> None:
    asked = [(name, f"{number} {PROMPT}", LONG_TOKENS) for number, name in enumerate(["sql", "chat"] * 4)]
    before = metric(features.server, "vllm:num_preemptions_total")
    requests = (dict(zip(("name", "prompt", "tokens"), one, strict=True)) for one in asked)
    answers = answered(features, (one | {"priority": number % 3} for number, one in enumerate(requests)))
    assert answers == [features.expected(*one) for one in asked]
    assert metric(features.server, "vllm:num_preemptions_total") > before


@pytest.mark.deployment("beam search", "tested", "every beam is PEFT's, while other adapters want the slots")
@pytest.mark.parametrize("name", ["sql", pytest.param("chat", marks=NIGHTLY)])
def test_every_beam_is_that_of_peft(features: Features, name: str) -> None:
    async def run() -> list[str]:
        async with features.client() as client:
            others = [asyncio.create_task(ids_of(client, other, PROMPT, 30)) for other in NAMES]
            body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "use_beam_search": True, "n": 3, **FIXED}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            await asyncio.gather(*others)
            return [choice["text"] for choice in answer.json()["choices"]]

    decoding = features.decoding(name)
    beams = decoding.beams(features.reference.prompt_ids(PROMPT), 8, 3)
    assert asyncio.run(run()) == [decoding.tokenizer.decode(ids) for ids in beams]


@pytest.mark.deployment("structured outputs", "tested", "each token is the best that the grammar allows by PEFT")
@pytest.mark.parametrize("name", ["sql", pytest.param("wide", marks=NIGHTLY)])
def test_structured_answers_are_the_best_allowed(features: Features, name: str) -> None:
    async def run() -> list[list[int]]:
        async with features.client() as client:
            others = [asyncio.create_task(ids_of(client, other, PROMPT, 30)) for other in NAMES]
            body = {"ignore_eos": False, "structured_outputs": {"regex": "[a-z ]{12}"}}
            ids = await ids_of(client, name, PROMPT, 40, **body)
            return [ids, *await asyncio.gather(*others)]

    def is_allowed(text: str) -> bool:
        return len(text) <= 12 and set(text) <= set("abcdefghijklmnopqrstuvwxyz ")

    decoding = features.decoding(name)
    expected = decoding.constrained(features.reference.prompt_ids(PROMPT), 40, is_allowed)
    ids, *others = asyncio.run(run())
    assert [token for token in ids if token != decoding.tokenizer.eos_token_id] == expected
    assert others == [features.expected(other, PROMPT, 30) for other in NAMES]


@pytest.mark.deployment("priority scheduling", "tested", "held requests of the first priority run first")
def test_the_first_priority_runs_first(features: Features) -> None:
    """Eighteen requests for eight rows, so three rounds: those that came last have the first priority.

    Rounds are compared, not ends within a round: all four adapters have slots, and answers of one round end together.
    """
    later, first = ["sql", "chat"] * 8, ["stable", "team/poet"]
    expected = {name: features.expected(name, PROMPT, 20) for name in {*later, *first}}

    async def run() -> list[str]:
        async with features.client() as client:
            for name in expected:
                assert (await client.post(f"/v1/loras/{name}/prefetch")).status_code == 200
            ended: list[str] = []

            async def ask(name: str, priority: int) -> None:
                ids = await ids_of(client, name, PROMPT, 20, priority=priority)
                ended.append(name)
                assert ids == expected[name]

            asked = []
            assert (await client.post("/pause", params={"mode": "keep"})).status_code == 200
            try:
                for place, name in enumerate([*later, *first]):
                    asked.append(asyncio.create_task(ask(name, 5 if place < len(later) else -1)))
                    least = later[: place + 1].count(name) or 1
                    await seen(lambda name=name, least=least: is_held(client, name, least))
            finally:
                assert (await client.post("/resume")).status_code == 200
            await asyncio.gather(*asked)
            return ended

    ended = asyncio.run(run())
    assert set(first) <= set(ended[:12]), "in the order of arrival, the last two of eighteen"


@pytest.mark.deployment("prefix caching on and off", "tested", "a swapped adapter never uses the old version's cache")
def test_a_swapped_adapter_uses_no_old_prefix(features: Features) -> None:
    hits = "vllm:prefix_cache_hits_total"

    async def run() -> None:
        async with features.client() as client:
            for number, original in enumerate(("sql", "chat", "sql"), 1):
                features.publish("swapped", original, number)
                if number > 1:
                    assert (await client.post("/v1/loras/swapped/refresh")).status_code == 200
                before = metric(features.server, hits)
                expected = features.expected(original, LONG_PROMPT, 8)
                assert await ids_of(client, "swapped", LONG_PROMPT, 8) == expected, original
                assert metric(features.server, hits) == before, "cached under the version before"
                assert await ids_of(client, "swapped", LONG_PROMPT, 8) == expected, original
                assert metric(features.server, hits) > before

    asyncio.run(run())


@pytest.mark.deployment("pause and resume", "tested", "keep, wait and abort, with running and held requests")
@pytest.mark.parametrize("mode", ["keep", pytest.param("wait", marks=NIGHTLY), "abort"])
def test_a_pause_ends_or_keeps_what_runs(features: Features, mode: str) -> None:
    """Two adapters run, a third is held as they have the host cache; one more asks during the pause."""
    running, held, late = ["sql", "wide"], "chat", "stable"

    async def run() -> None:
        async with features.client() as client:
            for name in (*running, held, late):
                await ids_of(client, name, PROMPT, 1)

            def ask(name: str, tokens: int) -> asyncio.Task[httpx.Response]:
                body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, **FIXED}
                return asyncio.create_task(client.post("/v1/completions", json=body))

            async def begun() -> tuple[list[asyncio.Task[httpx.Response]], asyncio.Task[httpx.Response]]:
                for _ in range(20):  # a slow machine may look only when they have ended
                    run = [ask(name, PAUSED_TOKENS) for name in running]
                    while not any(one.done() for one in run):
                        if all([await in_state(client, name, "serving", 1) for name in running]):
                            break
                    waits = ask(held, MAX_TOKENS)
                    while not any(one.done() for one in run):
                        if await is_held(client, held) and not any(one.done() for one in run):
                            return run, waits
                    await asyncio.gather(*run, waits)
                raise AssertionError("nothing was seen to run")

            run, waits = await begun()
            paused = await client.post("/pause", params={"mode": mode})
            assert paused.status_code == 200, paused.text
            asks_late = ask(late, MAX_TOKENS)
            try:
                await seen(lambda: is_held(client, late))
                if mode != "keep":
                    await asyncio.wait(run, timeout=LONGEST_S)
                await asyncio.sleep(0.5)
                assert not asks_late.done()
                assert waits.done() == (mode == "abort")
                assert [one.done() for one in run] == [mode != "keep"] * 2
            finally:
                assert (await client.post("/resume")).status_code == 200
            for name, answer in zip((*running, held, late), await asyncio.gather(*run, waits, asks_late), strict=True):
                assert answer.status_code == 200, answer.text
                (choice,) = answer.json()["choices"]
                tokens = PAUSED_TOKENS if name in running else MAX_TOKENS
                expected = features.expected(name, PROMPT, tokens)
                if mode == "abort" and name != late:
                    assert choice["finish_reason"] == "abort", name
                    assert choice["token_ids"] == expected[: len(choice["token_ids"])]
                else:
                    assert choice["token_ids"] == expected, name

    asyncio.run(run())


@pytest.mark.deployment("storms of aborts", "tested", "clients that leave, held or running, streamed or not")
def test_storms_of_aborts_leave_nothing(features: Features) -> None:
    chance = random.Random(20261122)

    async def give_up(client: httpx.AsyncClient, number: int) -> None:
        name = chance.choice(NAMES)
        body = {"model": name, "prompt": f"{number} {PROMPT}", "max_tokens": 200, "stream": number % 2 == 0, **FIXED}
        if number % 3 == 0:
            body.update(n=2, temperature=1.0)
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.sleep(chance.uniform(0, 1.5))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def run() -> list[list[int]]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=features.server.url, timeout=LONGEST_S, limits=limits) as client:
            for _ in range(3):
                await asyncio.gather(*(give_up(client, number) for number in range(32)))
            async with all_in_the_midst(client) as asked:
                assert (await client.post("/abort_requests", json={})).status_code == 200
                ended = await asyncio.gather(*asked)
            assert {answer.json()["choices"][0]["finish_reason"] for answer in ended} == {"abort"}
            return list(await asyncio.gather(*(ids_of(client, name, PROMPT, MAX_TOKENS) for name in NAMES)))

    assert asyncio.run(run()) == [features.bed.answers[name] for name in NAMES]


@asynccontextmanager
async def all_in_the_midst(client: httpx.AsyncClient) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Inside, a request for each name runs or is held, and the engine stands still."""
    while True:
        asked = [asyncio.create_task(client.post(
            "/v1/completions", json={"model": name, "prompt": PROMPT, "max_tokens": 200, **FIXED}
        )) for name in NAMES]  # fmt: skip
        await asyncio.sleep(0.1)  # two of them run meanwhile
        try:
            assert (await client.post("/pause", params={"mode": "keep"})).status_code == 200
            while not any(one.done() for one in asked):
                if all([await is_used(client, name) for name in NAMES]):
                    yield asked
                    return
        finally:
            assert (await client.post("/resume")).status_code == 200
        await asyncio.gather(*asked)  # one ended before the pause


async def is_used(client: httpx.AsyncClient, name: str) -> bool:
    view = (await client.get(f"/v1/loras/{name}")).json()
    return bool(view.get("requests_held", 0) + view.get("requests_in_flight", 0))


@pytest.mark.deployment("every adapter pinned", "refused", "the pin that would leave no slot for all others: L001, 503")
def test_pins_leave_a_slot_or_refuse(features: Features) -> None:
    async def run() -> None:
        async with features.client() as client:
            assert (await client.post("/v1/loras/wide/pin")).status_code == 200
            try:
                refused = await client.post("/v1/loras/sql/pin")
                assert (refused.status_code, "[L001]" in refused.text) == (503, True), refused.text
                features.publish("wide-two", "wide", 1)  # with the pinned one, more than the host cache takes
                body = {"model": "wide-two", "prompt": PROMPT, "max_tokens": 4}
                refused = await client.post("/v1/completions", json=body)
                assert (refused.status_code, "[L001]" in refused.text) == (503, True), refused.text
                answers = await asyncio.gather(*(ids_of(client, name, PROMPT, MAX_TOKENS) for name in NAMES))
                assert answers == [features.bed.answers[name] for name in NAMES]
            finally:
                assert (await client.post("/v1/loras/wide/unpin")).status_code == 200
            assert await ids_of(client, "wide-two", PROMPT, MAX_TOKENS) == features.bed.answers["wide"]

    asyncio.run(run())
