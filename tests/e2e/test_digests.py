"""Each answer says the digest of the adapter version that made it, to the real `openai` client.

By a server with `lora_admin` that is told to write no fingerprint of its own.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lora_plugins.lifecycle.response import HEADER
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import connect
from testbed.models import PROMPT
from tests.e2e.admin import Admin
from tests.e2e.digests import CHAT, EVERY_WAY, of_files, seen_by
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S, TOKENS, in_state, in_the_midst_of, is_held, seen


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
