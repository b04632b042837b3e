"""`lora_admin` in a real server: every route, unloading under load, and hot swaps.

One server with three slots that cost a copy, and an API key.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import hypothesis
import openai
import psutil
import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # while a test runs, an import this deep has failed in CPython 3.11
from hypothesis import strategies

from lora_plugins.lifecycle.response import HEADER
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import connect
from testbed.models import PROMPT
from testbed.server import Server
from tests.e2e.admin import HEADERS, KEY, Admin, serving
from tests.e2e.broken import BROKEN
from tests.e2e.standing_still import LONGEST_S, TOKENS, in_state, in_the_midst_of, seen
from tests.repetitions import times

SWAPS = times(200, short=24)
MARKS = tuple(range(SWAPS // 2, SWAPS + 1, SWAPS // 8))  # swaps after which memory is looked at
MOST_GROWTH_MB = 10  # from one mark to the next


@pytest.fixture(scope="module")
def admin(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    home = tmp_path_factory.mktemp("admin")
    root, allowed = home / "adapters", home / "allowed"
    for name in ("sql", "chat", "stable", "team/poet"):
        shutil.copytree(bed.adapters / name, root / name)
    allowed.mkdir()
    with serving(bed, home) as server:
        yield Admin(server, connect(server), bed, root, allowed)


@pytest.fixture(autouse=True)
def engine_lives(admin: Admin) -> Iterator[None]:
    yield
    assert admin.server.process.poll() is None
    assert httpx.get(f"{admin.server.url}/health", timeout=LONGEST_S).status_code == 200
    log = admin.server.log()
    for sign in ("EngineDeadError", "EngineCore encountered a fatal error", "Task exception was never retrieved"):
        assert sign not in log


# --- load ---


def test_an_adapter_is_loaded_from_a_uri(admin: Admin) -> None:
    uri = admin.publish("by-uri", "sql", below=admin.allowed).as_uri()
    body = {"lora_name": "from/uri", "source": {"uri": uri}}
    first = admin.done("POST", "/v1/loras", body)
    assert first["status"] == "success"
    assert first["lora_name"] == "from/uri"
    assert 1 <= first["lora_id"] < 2**31
    admin.answers_like("from/uri", "sql")
    again = admin.done("POST", "/v1/loras", body)
    assert again["lora_id"] == first["lora_id"]
    view = admin.view("from/uri")
    assert view["uri"] == uri
    assert (view["state"], view["rank"], view["lora_id"]) == ("serving", 8, first["lora_id"])
    assert {"store", "host"} <= set(view["tiers"])
    cards = {card.id: card for card in admin.client.models.list()}
    assert cards["from/uri"].root == view["path"]
    assert cards["from/uri"].parent == str(admin.bed.base)
    admin.done("DELETE", "/v1/loras/from/uri")


def test_a_refused_load_leaves_nothing(admin: Admin) -> None:
    before, allowed = admin.done("GET", "/v1/loras")["count"], admin.allowed.as_uri()
    cases: list[tuple[dict[str, Any], int, str]] = [
        *(
            ({"lora_name": "x", "source": {"uri": uri}}, 400, "L005")
            for uri in ("s3://b/x", f"{allowed}/../x", "no uri")
        ),
        ({"lora_name": "x", "source": {"uri": f"{allowed}/missing"}}, 404, "L002"),
        ({"lora_name": "no-such-adapter"}, 404, "L002"),
        ({"lora_name": str(admin.bed.base), "source": {"uri": f"{allowed}/x"}}, 400, "L005"),
        *((body, 400, "") for body in ({}, {"lora_name": ""}, {"lora_name": "x", "typo": 1})),
    ]
    for body, status, says in cases:
        answer = admin.call("POST", "/v1/loras", body)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), (body, answer.text)
    assert admin.done("GET", "/v1/loras")["count"] == before


# --- the list ---


def test_the_list_has_source_tiers_and_use_of_each(admin: Admin) -> None:
    began = time.time()
    for name in ("sql", "chat"):
        admin.answers_like(name, name)
    body = {"lora_name": "by-hand", "lora_path": str(admin.bed.adapters / "stable")}
    assert admin.call("POST", "/v1/load_lora_adapter", body).status_code == 200
    listed = admin.done("GET", "/v1/loras")
    assert listed["count"] == len(listed["loras"])
    views = {view["lora_name"]: view for view in listed["loras"]}
    assert views["sql"] == admin.view("sql")
    assert (views["sql"]["requests_in_flight"], views["sql"]["requests_held"]) == (0, 0)
    sql, by_hand = views["sql"], views["by-hand"]
    assert (sql["source"], sql["uri"]) == ("filesystem", (admin.root / "sql").as_uri())
    assert sql["digest"] == Path(sql["path"]).name
    assert {"store", "host", "slot"} == set(sql["tiers"])
    assert began - 1 < sql["last_used_at"] < time.time() + 1
    assert sql["size_bytes"] > 1000
    assert (by_hand["source"], by_hand["uri"]) == ("filesystem", (admin.bed.adapters / "stable").as_uri())
    assert (by_hand["digest"], by_hand["state"]) == (Path(by_hand["path"]).name, "serving")
    admin.done("DELETE", "/v1/loras/by-hand")
    assert admin.call("GET", "/v1/loras/nobody").status_code == 404


@pytest.mark.deployment("every adapter pinned", "refused", "the pin that would leave no slot for all others: L001, 503")
def test_pin_and_unpin(admin: Admin) -> None:
    for name in ("sql", "chat", "team/poet"):
        admin.answers_like(name, name)
    admin.done("POST", "/v1/loras/sql/pin")
    admin.done("POST", "/v1/loras/team/poet/pin")
    assert admin.view("team/poet")["pinned"]
    for name in ("chat", "stable", "chat", "stable"):  # beside them
        admin.answers_like(name, name)
    assert "slot" in admin.view("sql")["tiers"]
    admin.answers_like("sql", "sql")
    for name in ("sql", "team/poet"):
        admin.done("POST", f"/v1/loras/{name}/unpin")
        assert not admin.view(name)["pinned"]
    admin.done("POST", "/v1/loras/chat/pin")
    admin.done("POST", "/v1/loras/chat/unpin")
    assert admin.call("POST", "/v1/loras/nobody/pin").status_code == 404


def test_prefetch_brings_it_into_host_memory(admin: Admin) -> None:
    admin.publish("cold", "stable", 7)
    admin.done("POST", "/v1/loras/cold/prefetch")
    assert "host" in admin.view("cold")["tiers"]
    admin.answers_like("cold", "stable")
    assert admin.call("POST", "/v1/loras/nobody/prefetch").status_code == 404


# --- unload ---


async def stream(admin: Admin, name: str, tokens: int, started: asyncio.Event) -> tuple[list[int], str | None]:
    """Token ids and finish reason of one long stream."""
    async with openai.AsyncOpenAI(base_url=f"{admin.server.url}/v1", api_key=KEY, timeout=LONGEST_S) as client:
        ids: list[int] = []
        reason = None
        answer = await client.completions.create(
            model=name,
            prompt=PROMPT,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for chunk in answer:
            started.set()
            for choice in chunk.choices:
                ids.extend(getattr(choice, "token_ids", None) or [])
                reason = choice.finish_reason or reason
        return ids, reason


def asynchronous(admin: Admin) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=admin.server.url, headers=HEADERS, timeout=LONGEST_S)


def in_the_midst_of_a_stream(
    admin: Admin, client: httpx.AsyncClient, name: str
) -> AbstractAsyncContextManager[asyncio.Task[tuple[list[int], str | None]]]:
    """Inside, a request for this adapter has its first token and not its last, and the engine stands still."""

    async def begin() -> asyncio.Task[tuple[list[int], str | None]]:
        started = asyncio.Event()
        running = asyncio.create_task(stream(admin, name, TOKENS, started))
        await asyncio.wait((running, asyncio.create_task(started.wait())), return_when=asyncio.FIRST_COMPLETED)
        return running

    return in_the_midst_of(client, name, begin)


def test_unload_lets_running_requests_finish_and_frees_everything(admin: Admin) -> None:
    uri = admin.publish("drained", "sql", 1, below=admin.allowed).as_uri()
    admin.done("POST", "/v1/loras", {"lora_name": "drained", "source": {"uri": uri}})
    engine_ids = admin.in_worker()
    path = Path(admin.view("drained")["path"])

    async def unload() -> Any:
        async with asynchronous(admin) as client:
            async with in_the_midst_of_a_stream(admin, client, "drained") as running:
                deletion = client.delete("/v1/loras/drained", params={"timeout_s": LONGEST_S})
                unloading = asyncio.create_task(deletion)
                await seen(lambda: in_state(client, "drained", "draining", 1))
                body = {"model": "drained", "prompt": PROMPT, "max_tokens": 1}
                refused = await client.post("/v1/completions", json=body)
                assert await in_state(client, "drained", "draining", 1)
                assert engine_ids <= await asyncio.to_thread(admin.in_worker), "what runs keeps its memory"
                assert list((path.parent / ".leases" / path.name).glob("*")), "and the store's files"
                assert not unloading.done()
                assert not running.done()
            return await running, await unloading, refused

    (ids, reason), unloaded, refused = asyncio.run(unload())
    assert (len(ids), reason) == (TOKENS, "length")
    assert ids[:MAX_TOKENS] == admin.bed.answers["sql"]
    assert (unloaded.status_code, unloaded.json()["status"]) == (200, "success")
    assert refused.status_code == 404, "no new request"
    assert admin.call("GET", "/v1/loras/drained").status_code == 404
    assert len(engine_ids - admin.in_worker()) == 1, "gone from host memory and slot"
    assert list((path.parent / ".leases" / path.name).glob("*")) == [], "the store may evict it"


def test_after_the_deadline_running_requests_are_ended(admin: Admin) -> None:
    uri = admin.publish("ended", "sql", 2, below=admin.allowed).as_uri()
    admin.done("POST", "/v1/loras", {"lora_name": "ended", "source": {"uri": uri}})

    async def unload() -> Any:
        async with asynchronous(admin) as client, in_the_midst_of_a_stream(admin, client, "ended") as running:
            return await client.delete("/v1/loras/ended", params={"timeout_s": 0.2}), await running

    unloaded, (ids, reason) = asyncio.run(unload())
    assert reason == "abort"
    assert 0 < len(ids) < TOKENS
    assert unloaded.json()["status"] == "success"
    assert admin.engine_is_free_of("ended")


def test_an_unloaded_name_is_resolved_again_unless_blocked(admin: Admin) -> None:
    admin.answers_like("chat", "chat")
    admin.done("DELETE", "/v1/loras/chat")
    admin.answers_like("chat", "chat")
    by_digest = f"chat@{admin.view('chat')['digest']}"
    admin.answers_like(by_digest, "chat")
    admin.done("DELETE", "/v1/loras/chat", block=True)
    for name in ("chat", by_digest, "chat@main"):
        refused = admin.ask(name)
        assert (refused.status, "L002" in refused.error, "blocked" in refused.error) == (404, True, True), name
        assert name not in {card.id for card in admin.client.models.list()}
    assert admin.call("POST", "/v1/loras", {"lora_name": "chat@main"}).status_code == 404
    # A takedown is answered before the slot is free: until then the name drains, and is blocked all the same.
    ends = time.monotonic() + LONGEST_S
    while (state := admin.view("chat")["state"]) == "draining" and time.monotonic() < ends:
        time.sleep(0.05)
    assert state == "blocked"
    assert admin.call("DELETE", "/v1/loras/chat").status_code == 404
    admin.done("POST", "/v1/loras", {"lora_name": "chat"})
    admin.answers_like("chat", "chat")


# --- hot swap ---


def test_a_changed_adapter_is_swapped_and_rolled_back(admin: Admin) -> None:
    admin.publish("swapped", "sql", 1)
    admin.answers_like("swapped", "sql")
    first = admin.view("swapped")
    assert admin.done("POST", "/v1/loras/swapped/refresh")["message"].endswith("serves the newest version.")
    admin.publish("swapped", "chat", 2)
    admin.answers_like("swapped", "sql")  # until somebody looks
    admin.done("POST", "/v1/loras/swapped/refresh")
    admin.answers_like("swapped", "chat")
    second = admin.view("swapped")
    assert second["digest"] != first["digest"]
    assert second["lora_id"] == first["lora_id"]
    assert second["previous_digests"] == [first["digest"]]
    other = {"If-Match": f'"{first["digest"]}"'}
    refused = httpx.post(f"{admin.server.url}/v1/loras/swapped/rollback", headers={**HEADERS, **other}, timeout=60)
    assert (refused.status_code, "[L010]" in refused.text) == (412, True)
    done = admin.done("POST", "/v1/loras/swapped/rollback")
    assert (done["digest"], done["previous_digest"], done["swapped"]) == (first["digest"], second["digest"], True)
    assert done["elapsed_ms"] > 0
    admin.answers_like("swapped", "sql")
    assert admin.view("swapped")["pinned_digest"] == first["digest"]
    admin.done("POST", "/v1/loras/swapped/rollback", {"digest": second["digest"][:12]})
    admin.answers_like("swapped", "chat")
    admin.done("POST", "/v1/loras/swapped/refresh")
    assert admin.view("swapped")["pinned_digest"] is None
    assert admin.call("POST", "/v1/loras/swapped/rollback", {"digest": "abcdef00"}).status_code == 404
    assert admin.call("POST", "/v1/loras/sql/refresh").status_code == 200


def test_a_broken_update_leaves_the_old_one_serving(admin: Admin) -> None:
    name = "update"
    admin.publish(name, "sql", 1)
    admin.answers_like(name, "sql")
    fresh = admin.publish("fresh", "chat", 2)
    next(case for case in BROKEN if case.name == "wrong-shapes").make(fresh)
    (admin.root / name).rename(admin.root / "gone")
    fresh.rename(admin.root / name)
    refused = admin.call("POST", f"/v1/loras/{name}/refresh")
    assert refused.status_code == 400, refused.text
    admin.answers_like(name, "sql")
    error = admin.view(name)["last_error"]
    assert error["code"] in ("L003", "L005")
    subject = error["message"].partition(": found ")[0]  # what follows may hold paths, which vLLM hides from clients
    assert refused.json()["error"]["message"].startswith(subject)
    admin.publish(name, "chat", 3)
    admin.done("POST", f"/v1/loras/{name}/refresh")
    admin.answers_like(name, "chat")
    assert admin.view(name)["last_error"] is None


def resident_mb(server: Server) -> float:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sum(child.memory_info().rss for child in children if child.is_running()) / 1e6


@pytest.mark.slow
def test_many_swaps_under_load(admin: Admin) -> None:
    """Every answer is that of the version whose digest it says, nobody is refused, and nothing grows."""
    admin.publish("rollout", "sql", 0)
    admin.answers_like("rollout", "sql")
    answers_of = {admin.view("rollout")["digest"]: admin.bed.answers["sql"]}
    answered: list[tuple[str | None, list[int]]] = []
    resident: list[float] = []

    async def traffic(client: openai.AsyncOpenAI, done: asyncio.Event) -> None:
        while not done.is_set():
            raw = await client.completions.with_raw_response.create(
                model="rollout", prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            answered.append((raw.headers.get(HEADER), list(raw.parse().choices[0].token_ids)))

    async def run() -> None:
        done = asyncio.Event()
        async with (
            openai.AsyncOpenAI(
                base_url=f"{admin.server.url}/v1", api_key=KEY, max_retries=0, timeout=LONGEST_S
            ) as client,
            httpx.AsyncClient(base_url=admin.server.url, headers=HEADERS, timeout=LONGEST_S) as control,
        ):
            tasks = [asyncio.create_task(traffic(client, done)) for _ in range(4)]

            async def answered_by(digest: str, before: int) -> bool:
                assert not any(task.done() for task in tasks), "a request failed"
                return any(said == digest for said, _ in answered[before:])

            for number in range(1, SWAPS + 1):
                original = ("sql", "chat")[number % 2]
                await asyncio.to_thread(admin.publish, "rollout", original, number)
                swapped = await control.post("/v1/loras/rollout/refresh")
                assert swapped.status_code == 200, swapped.text
                assert "swapped" in swapped.json()["message"]
                answers_of[swapped.json()["digest"]] = admin.bed.answers[original]
                if number % 7 == 0:  # odd and even: some answers of either adapter
                    await seen(partial(answered_by, swapped.json()["digest"], len(answered)))
                if number in MARKS:
                    resident.append(resident_mb(admin.server))
            done.set()
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert len(answers_of) == SWAPS + 1
    assert [one for one in answered if answers_of.get(one[0] or "") != one[1]] == []
    assert len({digest for digest, _ in answered}) >= SWAPS // 7
    view = admin.view("rollout")
    assert len(view["previous_digests"]) == 2
    assert len(admin.in_worker()) <= 8
    views = admin.done("GET", "/v1/loras")["loras"]
    needed = {digest for view in views for digest in (view["digest"], *view["previous_digests"])}
    leases = Path(view["path"]).parent / ".leases"

    async def only_what_is_needed_is_leased() -> bool:
        return {entry.name for entry in leases.iterdir() if list(entry.glob("*"))} <= needed

    asyncio.run(seen(only_what_is_needed_is_leased))  # the last ones' a moment after their last request
    # What leaks, leaks from every mark to the next; an allocator that takes a large piece does so now and then.
    growth = [after - before for before, after in pairwise(resident)]
    assert min(growth) < MOST_GROWTH_MB, growth


# --- any request ---


@pytest.fixture(scope="module")
def api(admin: Admin) -> Any:
    page = httpx.get(f"{admin.server.url}/openapi.json", timeout=LONGEST_S).json()
    page["paths"] = {path: routes for path, routes in page["paths"].items() if path.startswith("/v1/loras")}
    return schemathesis.openapi.from_dict(page)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/loras", "GET"),
        ("/v1/loras", "POST"),
        ("/v1/loras/{lora_name}", "GET"),
        ("/v1/loras/{lora_name}", "DELETE"),
        *((f"/v1/loras/{{lora_name}}/{what}", "POST") for what in ("prefetch", "pin", "unpin", "refresh", "rollback")),
    ],
)
@hypothesis.settings(
    max_examples=times(25, short=8),
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    derandomize=True,
    database=None,
)
@hypothesis.given(data=strategies.data())
def test_any_request_is_answered_in_vllms_format(admin: Admin, api: Any, path: str, method: str, data: Any) -> None:
    """Names, bodies and queries generated from our OpenAPI page."""
    case = data.draw(api[path][method].as_strategy())
    answer = case.call(base_url=admin.server.url, headers={**(case.headers or {}), **HEADERS}, timeout=LONGEST_S)
    assert answer.status_code in (200, 400, 404, 405, 412, 422), answer.text
    if answer.status_code == 405:
        return  # an empty name is another route
    body = answer.json()
    if answer.status_code == 200:
        assert "lora_name" in body or "loras" in body or "data" in body
    else:
        if body == {"detail": "Not Found"}:  # a line break is in no route
            name = unquote(case.path_parameters["lora_name"])
            assert set(name) & {"\n", "\r", "\x85", "\u2028", "\u2029"}
            return
        assert set(body["error"]) >= {"message", "type", "param", "code"}, answer.text
        assert body["error"]["code"] == answer.status_code
        assert "Traceback" not in answer.text
