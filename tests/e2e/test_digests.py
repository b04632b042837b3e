"""Each answer says the digest of the adapter version that made it, to the real `openai` client.

By a server with `lora_admin` that is told to write no fingerprint of its own.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lora_plugins.server.response import HEADER
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import connect
from testbed.models import PROMPT
from tests.e2e.admin import KEY, Admin
from tests.e2e.digests import CHAT, EVERY_WAY, GREEDY, of_files, seen_by
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S, TOKENS, in_state, in_the_midst_of, is_held, seen

SWAPS = 12


@pytest.fixture(scope="module")
def admin(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    home = tmp_path_factory.mktemp("digests")
    root, allowed = home / "adapters", home / "allowed"
    shutil.copytree(bed.adapters / "sql", root / "sql")
    with admin_server(bed, home, "--max-loras", "2", "--fingerprint-mode", "none") as server:
        yield Admin(server, connect(server), bed, root, allowed)


@EVERY_WAY
def test_header_and_every_chunk_have_the_digest(admin: Admin, route: str, stream: bool) -> None:
    header, fingerprints = seen_by(admin.client, route, "sql", stream=stream)
    assert header == admin.view("sql")["digest"] == of_files(admin.root / "sql")
    assert set(fingerprints) <= {header}
    assert len(fingerprints) > 1 or not stream or route == "responses"


@EVERY_WAY
def test_the_base_model_says_none(admin: Admin, route: str, stream: bool) -> None:
    header, fingerprints = seen_by(admin.client, route, str(admin.bed.base), stream=stream)
    assert (header, set(fingerprints) | {None}) == (None, {None})


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"prompt": [PROMPT, PROMPT]}, {"use_beam_search": True, "n": 2}], ids=["n", "batch", "beams"]
)
def test_all_choices_of_an_answer_are_one_versions(admin: Admin, more: dict[str, Any]) -> None:
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}
    if more.get("n") == 2 and "use_beam_search" not in more:
        body["temperature"] = 1
    seen_one = admin.call("POST", "/v1/completions", body)
    assert len(seen_one.json()["choices"]) == 2
    digest = admin.view("sql")["digest"]
    assert (seen_one.headers[HEADER], seen_one.json()["system_fingerprint"]) == (digest, digest)


def test_other_routes_that_name_an_adapter_say_it(admin: Admin) -> None:
    body = {"model": "sql", "prompt": PROMPT}
    digest = admin.ask("sql").status == 200 and admin.view("sql")["digest"]
    assert admin.call("POST", "/tokenize", body).headers[HEADER] == digest
    message = {"model": "sql", "max_tokens": 4, "messages": CHAT}
    assert admin.call("POST", "/v1/messages", message).headers[HEADER] == digest
    assert HEADER not in admin.call("GET", "/v1/loras/sql").headers
    assert HEADER not in admin.call("POST", "/v1/loras/sql/refresh").headers


def test_a_request_that_a_swap_overtakes_says_the_old_digest(admin: Admin) -> None:
    admin.publish("during", "sql", 1)
    admin.answers_like("during", "sql")
    old = admin.view("during")["digest"]
    body = {"model": "during", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    async def swap() -> tuple[httpx.Response, httpx.Response, str]:
        async with httpx.AsyncClient(base_url=admin.server.url, timeout=LONGEST_S) as client:

            async def begin() -> asyncio.Task[httpx.Response]:
                asked = client.post("/v1/completions", json={**body, "max_tokens": TOKENS})
                running = asyncio.create_task(asked)
                await seen(lambda: in_state(client, "during", "serving", 1))
                return running

            async with in_the_midst_of(client, "during", begin) as running:
                await asyncio.to_thread(admin.publish, "during", "chat", 2)
                swapped = await client.post("/v1/loras/during/refresh")
                assert swapped.json()["swapped"], swapped.text
                later = asyncio.create_task(client.post("/v1/completions", json={**body, "max_tokens": MAX_TOKENS}))
                await seen(lambda: is_held(client, "during"))
                assert not running.done()
            return await running, await later, swapped.json()["digest"]

    running, later, new = asyncio.run(swap())
    assert (running.headers[HEADER], running.json()["system_fingerprint"]) == (old, old)
    assert running.json()["choices"][0]["token_ids"][:MAX_TOKENS] == admin.bed.answers["sql"]
    assert (later.headers[HEADER], later.json()["system_fingerprint"]) == (new, new)
    assert later.json()["choices"][0]["token_ids"] == admin.bed.answers["chat"]
    assert new == admin.view("during")["digest"] != old


def test_under_swaps_every_answer_has_its_versions_digest(admin: Admin) -> None:
    """What a client is told made its answer is the version whose answer, as PEFT has it, it is."""
    answers_of: dict[str, list[int]] = {}
    admin.publish("rollout", "sql", 0)
    admin.answers_like("rollout", "sql")
    answers_of[admin.view("rollout")["digest"]] = admin.bed.answers["sql"]
    answered: list[tuple[str | None, set[str | None], list[int]]] = []

    async def traffic(client: openai.AsyncOpenAI, done: asyncio.Event, stream: bool) -> None:
        while not done.is_set():
            raw = await client.completions.with_raw_response.create(
                model="rollout", prompt=PROMPT, stream=stream, **GREEDY
            )
            parsed = raw.parse()
            parts = [part async for part in parsed] if stream else [parsed]
            ids = [i for part in parts for choice in part.choices for i in getattr(choice, "token_ids", None) or ()]
            answered.append((raw.headers.get(HEADER), {part.system_fingerprint for part in parts}, ids))

    async def run() -> None:
        done = asyncio.Event()
        way = {"base_url": f"{admin.server.url}/v1", "api_key": KEY, "max_retries": 0, "timeout": LONGEST_S}
        async with (
            openai.AsyncOpenAI(**way) as client,
            httpx.AsyncClient(base_url=admin.server.url, timeout=LONGEST_S) as control,
            asyncio.TaskGroup() as group,
        ):
            for number in range(4):
                group.create_task(traffic(client, done, stream=number % 2 == 0))
            for number in range(1, SWAPS + 1):
                original = ("sql", "chat")[number % 2]
                await asyncio.to_thread(admin.publish, "rollout", original, number)
                swapped = await control.post("/v1/loras/rollout/refresh")
                assert swapped.json()["swapped"], swapped.text
                answers_of[swapped.json()["digest"]] = admin.bed.answers[original]
                before, new = len(answered), swapped.json()["digest"]
                if number % 3 == 0:  # the others overtake answers
                    await seen(lambda before=before, new=new: _are_among(new, answered[before:]))
            done.set()

    asyncio.run(run())
    assert len(answers_of) == SWAPS + 1
    assert [one for one in answered if answers_of.get(one[0] or "") != one[2]] == []
    assert [one for one in answered if one[1] != {one[0]}] == []
    assert len({header for header, _, _ in answered}) > SWAPS // 3


async def _are_among(digest: str, answered: list[Any]) -> bool:
    return any(header == digest for header, _, _ in answered)
