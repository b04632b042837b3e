"""One adapter is paused on a real server with one slot: others have the slot meanwhile, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_plugins.client import CallFailed, pause_async, resume_async
from lora_plugins.client import pause as pause_everywhere
from lora_plugins.client import resume as resume_everywhere
from testbed.events import events
from testbed.models import PROMPT
from testbed.pages import blocks
from testbed.reference import Reference
from tests.e2e.admin import KEY
from tests.e2e.conftest import OneSlot
from tests.e2e.standing_still import LONGEST_S, TOKENS, in_state, in_the_midst_of, is_held, seen
from tests.e2e.test_in_flight import body, tokens_of, view_of


@dataclass
class Stream:
    """A long answer while it comes."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None

    async def read(self, client: httpx.AsyncClient, name: str) -> None:
        async with client.stream("POST", "/v1/completions", json=body(name, TOKENS, stream=True)) as answer:
            async for event in events(answer):
                self.error = event.get("error", self.error)
                for choice in event.get("choices", []):
                    self.tokens += choice.get("token_ids") or []
                    self.finish_reason = choice["finish_reason"] or self.finish_reason


async def pause(client: httpx.AsyncClient, name: str, mode: str) -> dict[str, Any]:
    answer = await client.post(f"/v1/loras/{name}/pause", params={"mode": mode})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def resume(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post(f"/v1/loras/{name}/resume")
    assert answer.status_code == 200, answer.text


@asynccontextmanager
async def in_the_midst_of_a_stream(
    client: httpx.AsyncClient, name: str
) -> AsyncIterator[tuple[Stream, asyncio.Task[None]]]:
    """Inside, a long answer of this adapter has begun and not ended, and the engine stands still."""
    streams: list[Stream] = []

    async def begin() -> asyncio.Task[None]:
        stream = Stream()
        streams.append(stream)
        reading = asyncio.create_task(stream.read(client, name))

        async def has_begun() -> bool:
            return len(stream.tokens) > 3 or reading.done()

        await seen(has_begun)
        return reading

    async with in_the_midst_of(client, name, begin) as reading:
        yield streams[-1], reading


async def paused_in_the_midst(
    client: httpx.AsyncClient, name: str, mode: str = "keep"
) -> tuple[Stream, asyncio.Task[None]]:
    """Pause an adapter in the midst of a long answer."""
    async with in_the_midst_of_a_stream(client, name) as begun:
        pausing = asyncio.create_task(pause(client, name, mode))
        if mode != "wait":  # is answered after the stream's end
            await pausing
        await seen(lambda: in_state(client, name, "paused", int(mode == "wait")))
    assert (await pausing)["status"] == "success"
    return begun


@pytest.fixture(scope="module")
def long_answers(one_slot: OneSlot) -> dict[str, list[int]]:
    """PEFT's."""
    reference = Reference(one_slot.bed.base)
    ids = reference.prompt_ids(PROMPT)
    return {name: reference.generate(one_slot.bed.adapters / name, ids, TOKENS) for name in ("sql", "chat")}


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_one_adapter_is_paused_and_all_others_run(
    one_slot: OneSlot, long_answers: dict[str, list[int]], mode: str
) -> None:
    policy, other, expected = f"paused-{mode}", f"beside-{mode}", one_slot.bed.answers
    one_slot.publish(policy, "sql", 1)
    one_slot.publish(other, "chat", 1)

    async def train() -> Stream:
        async with one_slot.client() as client:
            stream, reading = await paused_in_the_midst(client, policy, mode)
            view = await view_of(client, policy)
            assert (view["state"], view["requests_in_flight"]) == ("paused", 0)
            assert view["requests_held"] == (mode == "keep")
            if mode != "keep":
                await reading
            had = len(stream.tokens)
            late = asyncio.create_task(tokens_of(client, policy))
            await seen(lambda: is_held(client, policy))
            for _ in range(2):
                assert await tokens_of(client, other) == expected["chat"], "in the only slot"
                assert await tokens_of(client, str(one_slot.bed.base)) == expected[None]
            assert (late.done(), len(stream.tokens)) == (False, had)
            assert 3 < had < TOKENS or mode == "wait"
            await resume(client, policy)
            assert await late == expected["sql"]
            assert (await view_of(client, policy))["state"] == "serving"
            await reading
            return stream

    stream = asyncio.run(train())
    assert (stream.error, stream.finish_reason) == (None, "abort" if mode == "abort" else "length")
    assert stream.tokens == long_answers["sql"][: len(stream.tokens)]
    assert len(stream.tokens) == TOKENS or mode == "abort"


def test_the_pause_of_a_dead_trainer_is_seen_and_ended(one_slot: OneSlot) -> None:
    page = Path("docs/guides/rl.md").read_text()
    (command,) = (block.text for block in blocks(page) if block.first.startswith("curl") and "/resume" in block.text)
    folders = [one_slot.publish(f"of-trl-{number}", "sql", number) for number in (1, 2)]

    async def until_its_end() -> list[int]:
        async with one_slot.client() as client:
            for number, folder in enumerate(folders, 1):
                body = {"lora_name": f"trl-policy-v{number}", "lora_path": str(folder)}
                assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
            assert await is_paused(client) == (False, 0.0)
            assert (await client.post("/pause", params={"mode": "keep"})).status_code == 200
            kept = asyncio.create_task(tokens_of(client, "trl-policy-v1"))
            await seen(lambda: is_held(client, "trl-policy-v1"))
            await asyncio.sleep(1.1)  # a scrape asks the engine once in a second
            assert await is_paused(client) == (True, 1.0)
            env = {**os.environ, "LORA_PLUGINS_URL": one_slot.server.url, "KEY": KEY, "LORA_PLUGINS_ADMIN_KEY": KEY}
            env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))
            run = await asyncio.create_subprocess_exec("bash", "-euc", command, env=env)
            assert await run.wait() == 0
            await asyncio.sleep(1.1)
            assert await is_paused(client) == (False, 0.0)
            names = [row["lora_name"] for row in (await client.get("/v1/loras")).json()["loras"]]
            assert not [name for name in names if name.startswith("trl-policy-")]
            return await kept

    assert asyncio.run(until_its_end()) == one_slot.bed.answers["sql"]


async def is_paused(client: httpx.AsyncClient) -> tuple[bool, float]:
    """What the list and what the metric says."""
    page = (await client.get("/metrics")).text
    (line,) = (line for line in page.splitlines() if line.startswith("lora_plugins_is_paused{"))
    return (await client.get("/v1/loras")).json()["is_paused"], float(line.split()[-1])


@pytest.mark.parametrize("running", ["finish", "inflight"])
def test_a_pause_outlives_a_swap(one_slot: OneSlot, long_answers: dict[str, list[int]], running: str) -> None:
    policy = f"swapped-{running}"
    folder = one_slot.publish(policy, "sql", 1)

    async def train() -> tuple[Stream, list[int], list[int], int]:
        async with one_slot.client() as client:
            stream, reading = await paused_in_the_midst(client, policy)
            early = asyncio.create_task(tokens_of(client, policy))
            await seen(lambda: is_held(client, policy))
            folder.rename(folder.with_name(f"old-{policy}"))
            one_slot.publish(policy, "chat", 2)
            swapped = await client.post(f"/v1/loras/{policy}/refresh", json={"running": running})
            assert (swapped.status_code, swapped.json()["swapped"]) == (200, True), swapped.text
            view = await view_of(client, policy)
            assert (view["state"], view["requests_held"]) == ("paused", 2), "the stream, and `early`"
            late = asyncio.create_task(tokens_of(client, policy))
            await seen(lambda: is_held(client, policy, 3))
            had = len(stream.tokens)
            await resume(client, policy)
            answers = await early, await late
            await reading
            return stream, *answers, had

    stream, early, late, had = asyncio.run(train())
    expected = one_slot.bed.answers
    assert (stream.error, len(stream.tokens), late) == (None, TOKENS, expected["chat"])
    if running == "finish":
        assert (stream.tokens, early) == (long_answers["sql"], expected["sql"]), "they came for the version before"
        return
    assert early == expected["chat"]
    reference, bed = Reference(one_slot.bed.base), one_slot.bed
    again = reference.prompt_ids(PROMPT) + stream.tokens[:had]  # all is computed again, with the new weights
    assert stream.tokens[:had] == long_answers["sql"][:had]
    assert reference.misses(bed.adapters / "chat", again, stream.tokens[had:]) == []
    assert reference.misses(bed.adapters / "sql", again, stream.tokens[had:]) != []


def test_an_unload_of_a_paused_name_ends_the_pause(one_slot: OneSlot, long_answers: dict[str, list[int]]) -> None:
    one_slot.publish("left", "sql", 1)

    async def train() -> tuple[Stream, httpx.Response, httpx.Response]:
        async with one_slot.client() as client:
            stream, reading = await paused_in_the_midst(client, "left")
            held = asyncio.create_task(client.post("/v1/completions", json=body("left", 1)))
            await seen(lambda: is_held(client, "left", 2))
            async with asyncio.timeout(LONGEST_S):
                unloaded = await client.delete("/v1/loras/left")
                await reading
                answer = await held
            assert await tokens_of(client, "left") == one_slot.bed.answers["sql"], "the pause has ended with the name"
            return stream, answer, unloaded

    stream, answer, unloaded = asyncio.run(train())
    assert (unloaded.status_code, answer.status_code) == (200, 200), answer.text
    assert (stream.error, stream.tokens) == (None, long_answers["sql"])


def test_what_is_not_served_is_not_paused(one_slot: OneSlot) -> None:
    async def ask() -> list[int]:
        async with one_slot.client() as client:
            paused = [await client.post(f"/v1/loras/nobody/{verb}") for verb in ("pause", "resume")]
            wrong = await client.post("/v1/loras/nobody/pause", params={"mode": "later"})
            return [answer.status_code for answer in (*paused, wrong)]

    assert asyncio.run(ask()) in ([404, 404, 400], [404, 404, 422])


NOBODY = "http://127.0.0.1:9"


def test_no_id_that_clients_choose_delays_a_pause(one_slot: OneSlot) -> None:
    """Prompts of one request have ids of this form: a pause that waits for requests waits for all their parts."""
    one_slot.publish("flooded", "sql", 1)

    async def flood(client: httpx.AsyncClient, answered: list[int]) -> None:
        while True:
            answer = await client.post(
                "/v1/completions", json=body("flooded", TOKENS // 8), headers={"X-Request-Id": "cmpl-same"}
            )
            answered.append(answer.status_code)

    async def paused_after(client: httpx.AsyncClient, answered: list[int]) -> int:
        """Answers that came before the pause."""
        await seen(lambda: has(answered, 4))
        await asyncio.wait_for(pause(client, "flooded", "wait"), LONGEST_S)
        return len(answered)

    async def has(answered: list[int], many: int) -> bool:
        return len(answered) >= many

    async def serve() -> None:
        answered: list[int] = []
        async with one_slot.client() as client:
            floods = [asyncio.create_task(flood(client, answered)) for _ in range(4)]
            before = await paused_after(client, answered)
            await asyncio.sleep(1)
            assert len(answered) <= before + 4, "no request that came later runs"
            await resume(client, "flooded")
            await seen(lambda: has(answered, before + 8))
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)

    asyncio.run(serve())


@pytest.mark.parametrize("mode", ["keep", *(pytest.param(it, marks=pytest.mark.nightly) for it in ("wait", "abort"))])
def test_a_trainer_pauses_and_resumes_a_name(one_slot: OneSlot, mode: str) -> None:
    name, servers = f"trained-{mode}", [one_slot.server.url]
    one_slot.publish(name, "sql", 1)

    async def ask(*, is_paused: bool) -> list[int]:
        async with one_slot.client() as client:
            if not is_paused:
                return await tokens_of(client, name)
            held = asyncio.create_task(tokens_of(client, name))
            await seen(lambda: is_held(client, name))
            assert (await view_of(client, name))["state"] == "paused"
            await resume_async(name, servers=servers)
            return await held

    assert asyncio.run(ask(is_paused=False)) == one_slot.bed.answers["sql"]
    pause_everywhere(name, mode, servers=servers)
    assert asyncio.run(ask(is_paused=True)) == one_slot.bed.answers["sql"]
    resume_everywhere(name, servers=servers)
    assert asyncio.run(ask(is_paused=False)) == one_slot.bed.answers["sql"]


def test_a_trainer_learns_which_server_did_not_pause(one_slot: OneSlot) -> None:
    one_slot.publish("half", "sql", 1)
    servers = [one_slot.server.url, NOBODY]

    async def train() -> list[str]:
        async with one_slot.client() as client:
            await tokens_of(client, "half")
            states = []
            for verb in (pause_async, resume_async):
                with pytest.raises(CallFailed, match="ConnectError") as failed:
                    await verb("half", servers=servers)
                assert list(failed.value.errors) == [NOBODY]
                states.append((await view_of(client, "half"))["state"])
            return states

    assert asyncio.run(train()) == ["paused", "serving"], "the server that answers does as asked"
    for wrong in (("nobody", "wait", "404"), ("half", "later", "4")):
        with pytest.raises(CallFailed, match=f": {wrong[2]}"):
            pause_everywhere(*wrong[:2], servers=servers[:1])


def test_a_pause_that_another_resume_ends_raises(one_slot: OneSlot) -> None:
    one_slot.publish("ended", "sql", 1)
    servers = [one_slot.server.url]

    async def train() -> None:
        async with one_slot.client() as client:
            async with in_the_midst_of_a_stream(client, "ended") as (_, reading):
                pausing = asyncio.create_task(pause_async("ended", servers=servers))
                await seen(lambda: in_state(client, "ended", "paused", 1))
                await resume_async("ended", servers=servers)
                with pytest.raises(CallFailed, match="resumed"):
                    await pausing
            await reading

    asyncio.run(train())
