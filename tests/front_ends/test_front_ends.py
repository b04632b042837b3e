"""What every front end answers: one list of cases for each way to start API servers, on real ones.

Which of these hold for `LLM` and `AsyncLLM`, which have neither names nor an admin API, is in test_offline.py.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from lora_plugins.lifecycle.response import HEADER
from testbed.bed import MAX_TOKENS, Bed
from testbed.events import events
from testbed.models import PROMPT
from testbed.which_server import HEADER as WHICH
from tests.e2e.admin import HEADERS, KEY
from tests.e2e.broken import BROKEN
from tests.e2e.digests import CHAT, of_files
from tests.e2e.standing_still import LONGEST_S
from tests.front_ends.front_end import FRONT_ENDS, GREEDY, TENANT, FrontEnd, Kind, opened, put, tokens
from tests.repetitions import times

NIGHTLY = pytest.mark.nightly
CHATS = "/v1/chat/completions"
LONG = 300  # tokens of an answer that goes on while something is done


SAID = "changes, policy and shares are the same on each"


def marks(kind: Kind) -> list[pytest.MarkDecorator]:
    evidence = [pytest.mark.deployment(kind.cell, "tested", SAID)] if kind.cell else []
    return [*evidence, NIGHTLY] if kind.is_nightly else evidence


@pytest.fixture(scope="module", params=[pytest.param(kind, id=kind.name, marks=marks(kind)) for kind in FRONT_ENDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


# --- names ---


def test_there_are_as_many_servers_as_asked_for(front_end: FrontEnd, kind: Kind) -> None:
    assert len(front_end.every) == kind.count
    for answer in front_end.everywhere(None):
        assert tokens(answer) == front_end.bed.answers[None]
        assert HEADER not in answer.headers


def test_an_unknown_name_is_served_in_the_same_version(front_end: FrontEnd) -> None:
    for name in ("sql", "chat", "team/poet"):
        front_end.is_everywhere(name, name)
    assert {"sql", "chat", "team/poet"} <= {one["lora_name"] for one in front_end.done("GET", "/v1/loras")["loras"]}


def test_a_name_that_no_source_has_is_vllms_404(front_end: FrontEnd) -> None:
    assert "The model `nobody` does not exist." in front_end.is_nowhere("nobody")


@NIGHTLY
@pytest.mark.parametrize("name", ["../sql", "/sql", "team/../sql", "sql/", "sql\n", "sql@" + "0" * 64, "sql@nothing"])
def test_a_wrong_name_is_refused_alike(front_end: FrontEnd, name: str) -> None:
    statuses = {answer.status_code for answer in front_end.everywhere(name)}
    assert len(statuses) == 1
    assert statuses <= {400, 404}


@NIGHTLY
@pytest.mark.parametrize("fault", ["truncated", "wrong-shapes"])
def test_a_broken_adapter_is_refused_until_it_is_repaired(front_end: FrontEnd, fault: str) -> None:
    case = next(case for case in BROKEN if case.name == fault)
    case.make(front_end.publish(fault, "sql"))
    text = front_end.is_nowhere(fault, case.status)
    assert all(part in text for part in case.texts)
    assert all(fault not in answer.text for answer in front_end.called_everywhere("GET", "/v1/models"))
    front_end.publish(fault, "sql", 1)
    front_end.is_everywhere(fault, "sql")


@NIGHTLY
def test_a_cold_adapter_asked_for_everywhere_is_loaded_once(front_end: FrontEnd) -> None:
    front_end.publish("cold", "chat")
    answers = front_end.everywhere("cold", count=30)
    assert all(tokens(answer) == front_end.bed.answers["chat"] for answer in answers)
    log = front_end.server.log()
    assert log.count("Adapter 'cold' from filesystem") == log.count("Resolved and loaded LoRA adapter 'cold'") == 1
    lists = [answer.json()["loras"] for answer in front_end.called_everywhere("GET", "/v1/loras")]
    assert len({one["lora_id"] for of_one in lists for one in of_one if one["lora_name"] == "cold"}) == 1


@NIGHTLY
def test_an_older_version_is_served_by_its_digest(front_end: FrontEnd) -> None:
    digest = of_files(front_end.publish("versioned", "sql"))
    front_end.done("POST", "/v1/loras", {"lora_name": "versioned"})
    front_end.is_everywhere(f"versioned@{digest[:12]}", "sql", digest)
    front_end.publish("versioned", "chat", 1)
    front_end.done("POST", "/v1/loras/versioned/refresh")
    front_end.is_everywhere(f"versioned@{digest}", "sql", digest)
    front_end.is_everywhere("versioned", "chat")


@NIGHTLY
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/completions", CHATS, "/v1/messages"])
def test_every_route_says_the_version(front_end: FrontEnd, path: str, stream: bool) -> None:
    more = {"messages": CHAT} if path != "/v1/completions" else {}
    for answer in front_end.everywhere("sql", path=path, stream=stream, **more):
        assert (answer.status_code, answer.headers[HEADER]) == (200, of_files(front_end.root / "sql")), answer.text


@NIGHTLY
def test_routes_that_do_not_generate_know_names_too(front_end: FrontEnd) -> None:
    assert {answer.status_code for answer in front_end.everywhere("sql", path="/tokenize")} == {200}
    front_end.is_nowhere("nobody", path="/tokenize")


# --- lists ---


def test_every_server_lists_the_same(front_end: FrontEnd) -> None:
    front_end.everywhere("sql")
    for path, names_of in (("/v1/models", lambda it: [(one["id"], one["root"]) for one in it["data"]]),
                           ("/v1/loras", lambda it: [one["lora_name"] for one in it["loras"]])):  # fmt: skip
        lists = [names_of(answer.json()) for answer in front_end.called_everywhere("GET", path)]
        assert all(of_one == lists[0] for of_one in lists)
        assert any("sql" in one for one in lists[0])


@NIGHTLY
def test_pages_go_on_at_whichever_server_is_asked(front_end: FrontEnd) -> None:
    whole = sorted(one["lora_name"] for one in front_end.done("GET", "/v1/loras")["loras"])
    seen, after = list[str](), dict[str, Any]()
    while True:
        page = front_end.done("GET", "/v1/loras", limit=1, **after)
        seen += [one["lora_name"] for one in page["loras"]]
        if page.get("next") is None:
            break
        after = {"after": page["next"]}
    assert seen == whole


def test_metrics_are_of_all_servers(front_end: FrontEnd) -> None:
    def counted() -> list[float]:
        lines = front_end.call("GET", "/metrics").text.splitlines()
        return [
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"lora_plugins_{name}_total"))
            for name in ("requests", "generation_tokens")
        ]

    before = counted()
    answers = front_end.everywhere("sql", max_tokens=1)
    ends_at = time.monotonic() + LONGEST_S
    while counted() != [number + len(answers) for number in before]:
        assert time.monotonic() < ends_at
        time.sleep(0.1)


# --- swaps ---


def test_after_a_swap_every_server_answers_with_the_new_version(front_end: FrontEnd) -> None:
    for number, original in enumerate(["sql", "chat"] * times(3, short=1)):
        front_end.publish("swapped", original, number)
        digest = of_files(front_end.root / "swapped")
        path, body = ("/v1/loras/swapped/refresh", None) if number else ("/v1/loras", {"lora_name": "swapped"})
        assert front_end.done("POST", path, body)["digest"] == digest
        front_end.is_everywhere("swapped", original)


def test_answers_during_swaps_are_of_the_version_in_the_header(front_end: FrontEnd) -> None:
    originals = {of_files(front_end.publish("beside", "sql", 100)): "sql"}
    front_end.done("POST", "/v1/loras", {"lora_name": "beside"})

    async def swaps_and_answers() -> tuple[list[httpx.Response], list[tuple[int, str]]]:
        answers: list[httpx.Response] = []
        begun_before: list[tuple[int, str]] = []  # after each swap's answer: where later answers begin, and the digest
        is_over = False

        async def keep_asking() -> None:
            while not is_over:
                answers.append(await front_end.asked("beside"))

        askers = [asyncio.create_task(keep_asking()) for _ in range(6)]
        for number, original in enumerate(["chat", "wide", "sql", "stable"] * times(2, short=1)):
            digest = of_files(await asyncio.to_thread(front_end.publish, "beside", original, number))
            originals[digest] = original
            change = await asyncio.to_thread(front_end.done, "POST", "/v1/loras/beside/refresh")
            assert change["digest"] == digest
            fresh = await asyncio.gather(*(front_end.asked("beside") for _ in range(6)))
            begun_before += [(number, digest) for answer in fresh if answer.headers[HEADER] != digest]
            answers += fresh
        is_over = True
        await asyncio.gather(*askers)
        return answers, begun_before

    answers, stale = asyncio.run(swaps_and_answers())
    assert stale == []
    assert {answer.headers[WHICH] for answer in answers} == front_end.every
    wrong = [answer for answer in answers if tokens(answer) != front_end.bed.answers[originals[answer.headers[HEADER]]]]
    assert wrong == []


@NIGHTLY
def test_requests_that_a_swap_overtakes_end_on_their_version(front_end: FrontEnd) -> None:
    old = of_files(front_end.publish("overtaken", "sql"))
    front_end.done("POST", "/v1/loras", {"lora_name": "overtaken"})

    async def run() -> list[Stream]:
        running = await begun(front_end, "overtaken")
        await asyncio.to_thread(front_end.publish, "overtaken", "chat", 1)
        await asyncio.to_thread(front_end.done, "POST", "/v1/loras/overtaken/refresh")
        return list(await asyncio.gather(*running))

    for answer in asyncio.run(run()):
        assert (answer.digest, answer.reason) == (old, "length")
        assert answer.ids[:MAX_TOKENS] == front_end.bed.answers["sql"]
    front_end.is_everywhere("overtaken", "chat")


@NIGHTLY
def test_a_broken_update_leaves_the_old_version_serving(front_end: FrontEnd) -> None:
    served = of_files(front_end.publish("updated", "sql"))
    front_end.done("POST", "/v1/loras", {"lora_name": "updated"})
    next(case for case in BROKEN if case.name == "truncated").make(front_end.publish("updated", "chat", 1))
    answers = front_end.called_everywhere("POST", "/v1/loras/updated/refresh")
    assert {answer.status_code for answer in answers} == {400}
    front_end.is_everywhere("updated", "sql", served)
    assert all("L005" in answer.text for answer in front_end.called_everywhere("GET", "/v1/loras/updated"))


@NIGHTLY
def test_a_change_of_an_unexpected_version_is_refused(front_end: FrontEnd) -> None:
    served = of_files(front_end.publish("matched", "sql"))
    front_end.done("POST", "/v1/loras", {"lora_name": "matched"})
    for method, path in (("POST", "/refresh"), ("POST", "/rollback"), ("POST", "/pin"), ("DELETE", "")):
        refused = httpx.request(method, f"{front_end.server.url}/v1/loras/matched{path}", timeout=LONGEST_S,
                                headers={**HEADERS, "If-Match": f'"{"0" * 64}"'})  # fmt: skip
        assert (refused.status_code, "[L010]" in refused.text) == (412, True), path
    front_end.is_everywhere("matched", "sql", served)


def test_a_push_a_pin_and_a_rollback_reach_every_server(front_end: FrontEnd) -> None:
    (digest,) = {put(front_end, "pushed", "sql").raise_for_status().json()["digest"] for _ in range(4)}
    front_end.done("POST", "/v1/loras/pushed/pin")
    front_end.is_everywhere("pushed", "sql", digest)
    view = front_end.view("pushed")
    assert (view["pinned"], view["last_used_at"] is not None) == (True, True)
    newest = put(front_end, "pushed", "chat").raise_for_status().json()
    assert newest["swapped"]
    front_end.is_everywhere("pushed", "chat", newest["digest"])
    assert front_end.done("POST", "/v1/loras/pushed/rollback")["digest"] == digest
    front_end.is_everywhere("pushed", "sql", digest)
    front_end.done("POST", "/v1/loras/pushed/unpin")
    assert {answer.json()["pinned"] for answer in front_end.called_everywhere("GET", "/v1/loras/pushed")} == {False}


def test_a_stalled_push_stops_no_other(front_end: FrontEnd) -> None:
    """Once the later push waited, and each client that left cost a traceback of 78 lines."""
    before, address = front_end.server.log(), urlsplit(front_end.server.url)
    stalled = [socket.create_connection((address.hostname, address.port)) for _ in range(3)]
    lines = [
        "PUT /v1/loras/stalled HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {KEY}",
        "Content-Length: 1000",
        "",
        "",
    ]
    for one in stalled:
        one.sendall("\r\n".join(lines).encode() + b"\x10\0\0\0\0\0\0\0")
    time.sleep(1)
    digest = put(front_end, "stalled", "chat").raise_for_status().json()["digest"]
    front_end.is_everywhere("stalled", "chat", digest)
    for one in stalled:
        one.close()
    deadline = time.monotonic() + LONGEST_S
    while (new := front_end.server.log().removeprefix(before)).count("left before the end of the body") < len(stalled):
        assert time.monotonic() < deadline, new
        time.sleep(0.1)
    assert "Traceback" not in new
    assert "never retrieved" not in new


@NIGHTLY
def test_a_push_that_is_no_adapter_changes_nothing(front_end: FrontEnd) -> None:
    digest = put(front_end, "whole", "sql").raise_for_status().json()["digest"]
    url = f"{front_end.server.url}/v1/loras/whole"
    for _ in range(6):  # on new connections
        refused = httpx.put(url, content=b"\xff" * 100_000, headers=HEADERS, timeout=LONGEST_S)
        assert (refused.status_code, "[L005]" in refused.text) == (400, True)
    front_end.is_everywhere("whole", "sql", digest)


@NIGHTLY
def test_a_uri_is_loaded_and_a_refused_one_leaves_nothing(front_end: FrontEnd) -> None:
    body = {
        "lora_name": "from/uri",
        "source": {"uri": front_end.publish("by-uri", "sql", below=front_end.allowed).as_uri()},
    }
    loads = front_end.called_everywhere("POST", "/v1/loras", body)
    assert len({answer.json()["lora_id"] for answer in loads}) == 1
    front_end.is_everywhere("from/uri", "sql", of_files(front_end.allowed / "by-uri"))
    count = front_end.done("GET", "/v1/loras")["count"]
    for source, status in ((f"{front_end.allowed.as_uri()}/none", 404), ("s3://b/x", 400), ("file:///etc", 400)):
        refused = front_end.called_everywhere("POST", "/v1/loras", {"lora_name": "x", "source": {"uri": source}})
        assert {answer.status_code for answer in refused} == {status}, source
    assert front_end.done("GET", "/v1/loras")["count"] == count
    front_end.done("DELETE", "/v1/loras/from/uri")


@NIGHTLY
def test_prefetch_brings_an_adapter_into_host_memory(front_end: FrontEnd) -> None:
    front_end.publish("fetched", "chat")
    assert {answer.status_code for answer in front_end.called_everywhere("POST", "/v1/loras/fetched/prefetch")} == {200}
    assert {"store", "host"} <= set(front_end.view("fetched")["tiers"])
    front_end.is_everywhere("fetched", "chat")


def test_a_chat_without_copy_and_source_is_answered_from_memory(front_end: FrontEnd) -> None:
    """With the adapter's own template, which an API server that has never read the copy cannot read any more."""
    published = front_end.publish("forgotten", "sql")
    (published / "chat_template.jinja").write_text("the quick brown fox")
    front_end.done("POST", "/v1/loras/forgotten/prefetch")
    stored = front_end.root.parent / "store" / front_end.view("forgotten")["digest"]
    for gone in (published, stored):
        shutil.rmtree(gone)
    of_template, of_base = (prompts_of_chats(front_end, name) for name in ("forgotten", "sql"))
    assert len(of_template) == len(of_base) == 1
    assert of_template != of_base
    for answer in front_end.everywhere("forgotten"):
        assert tokens(answer) == front_end.bed.answers["sql"]
    assert not stored.exists()


def prompts_of_chats(front_end: FrontEnd, name: str) -> set[tuple[int, ...]]:
    """The tokens that every API server makes of one chat."""
    answers = front_end.everywhere(name, path=CHATS, messages=CHAT)
    assert {answer.status_code for answer in answers} == {200}, {answer.text for answer in answers}
    return {tuple(answer.json()["prompt_token_ids"]) for answer in answers}


# --- unloads and blocks ---


def test_what_is_unloaded_or_blocked_is_so_on_every_server(front_end: FrontEnd) -> None:
    digest = of_files(front_end.publish("gone", "sql", 77))
    assert front_end.done("POST", "/v1/loras", {"lora_name": "gone"})["digest"] == digest
    front_end.is_everywhere("gone", "sql")
    front_end.is_everywhere(f"gone@{digest}", "sql", digest)
    front_end.done("DELETE", "/v1/loras/gone", block=True)
    for name in ("gone", f"gone@{digest}"):
        front_end.is_nowhere(name, says="blocked")
    front_end.done("POST", "/v1/loras", {"lora_name": "gone"})
    front_end.is_everywhere("gone", "sql")
    shutil.rmtree(front_end.root / "gone")
    front_end.done("DELETE", "/v1/loras/gone")
    front_end.is_nowhere("gone")
    assert {answer.status_code for answer in front_end.called_everywhere("DELETE", "/v1/loras/gone")} == {404}


@NIGHTLY
def test_an_unload_with_a_deadline_ends_requests_everywhere(front_end: FrontEnd) -> None:
    front_end.publish("ended", "sql")

    async def run() -> list[Stream]:
        running = await begun(front_end, "ended")
        await asyncio.to_thread(front_end.done, "DELETE", "/v1/loras/ended", timeout_s=0)
        return list(await asyncio.gather(*running))

    ended = set[str]()
    for _ in range(10):  # an answer may be faster than the unload
        ended |= {answer.server for answer in asyncio.run(run()) if answer.reason == "abort"}
        if ended == front_end.every:
            break
    assert ended == front_end.every
    assert front_end.engine_is_free_of("ended")


@NIGHTLY
def test_callers_that_leave_leave_nothing_in_flight(front_end: FrontEnd) -> None:
    front_end.everywhere("sql", max_tokens=1)

    async def run() -> None:
        for one in await begun(front_end, "sql"):
            one.cancel()

    asyncio.run(run())
    ends_at = time.monotonic() + LONGEST_S
    while front_end.view("sql")["requests_in_flight"]:
        assert time.monotonic() < ends_at
        time.sleep(0.05)


@pytest.mark.parametrize("again", ["refused", pytest.param("in place", marks=NIGHTLY)])
def test_vllms_own_endpoints_reach_every_server(front_end: FrontEnd, again: str) -> None:
    body = {"lora_name": "by-path", "lora_path": str(front_end.bed.adapters / "stable")}
    loaded = front_end.call("POST", "/v1/load_lora_adapter", body)
    assert loaded.status_code == 200, loaded.text
    front_end.is_everywhere("by-path", "stable", of_files(front_end.bed.adapters / "stable"))
    if again == "refused":
        assert {one.status_code for one in front_end.called_everywhere("POST", "/v1/load_lora_adapter", body)} == {400}
    else:
        other = {"lora_path": str(front_end.bed.adapters / "chat"), "load_inplace": True}
        assert front_end.call("POST", "/v1/load_lora_adapter", {**body, **other}).status_code == 200
        front_end.is_everywhere("by-path", "chat", of_files(front_end.bed.adapters / "chat"))
    gone = front_end.call("POST", "/v1/unload_lora_adapter", {"lora_name": "by-path"})
    assert gone.status_code == 200, gone.text
    front_end.is_nowhere("by-path")


# --- pauses ---


@pytest.mark.parametrize("mode", ["keep", pytest.param("wait", marks=NIGHTLY), pytest.param("abort", marks=NIGHTLY)])
def test_a_pause_holds_requests_of_every_server_until_a_resume(front_end: FrontEnd, kind: Kind, mode: str) -> None:
    name = f"paused-{mode}"
    front_end.publish(name, "sql")
    front_end.is_everywhere(name, "sql")

    async def held() -> list[httpx.Response]:
        asked = [asyncio.create_task(front_end.asked(name)) for _ in range(8 * kind.count)]
        ends_at = time.monotonic() + LONGEST_S
        while (await asyncio.to_thread(front_end.view, name))["requests_held"] < len(asked):
            assert time.monotonic() < ends_at
            await asyncio.sleep(0.05)
        in_engines = await asyncio.to_thread(held_by_engine, front_end)
        assert (len(in_engines), sum(in_engines)) == (kind.engines, len(asked))
        assert all(in_engines), "each engine holds some"
        beside = await asyncio.gather(*(front_end.asked("chat") for _ in range(4 * kind.count)))
        assert all(tokens(answer) == front_end.bed.answers["chat"] for answer in beside), "all others run on"
        assert not any(one.done() for one in asked)
        resumed = await asyncio.to_thread(front_end.done, "POST", f"/v1/loras/{name}/resume")
        assert resumed["message"].endswith("resumed.")
        return list(await asyncio.gather(*asked))

    servers = set[str]()
    for _ in range(40):
        paused = front_end.called_everywhere("POST", f"/v1/loras/{name}/pause?mode={mode}")
        assert {answer.json()["status"] for answer in paused} == {"success"}
        views = front_end.called_everywhere("GET", f"/v1/loras/{name}")
        assert {(view.json()["state"], view.json()["requests_in_flight"]) for view in views} == {("paused", 0)}
        answers = asyncio.run(held())
        assert all(tokens(answer) == front_end.bed.answers["sql"] for answer in answers)
        servers |= {answer.headers[WHICH] for answer in answers}
        if servers == front_end.every:
            break
    assert servers == front_end.every
    front_end.is_everywhere(name, "sql")


def held_by_engine(front_end: FrontEnd) -> list[float]:
    """How many requests each engine holds."""
    return figures(front_end, "lora_plugins_held{")


def ended_parts(front_end: FrontEnd) -> float:
    """How many requests vLLM has ended as long as asked for; each token of a beam is one."""
    return sum(it for it in figures(front_end, 'vllm:request_success_total{engine="'))


def figures(front_end: FrontEnd, beginning: str) -> list[float]:
    """The figures of the lines of /metrics that begin so."""
    lines = front_end.call("GET", "/metrics").text.splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginning)]


@pytest.mark.parametrize("mode", ["keep", pytest.param("abort", marks=NIGHTLY), pytest.param("wait", marks=NIGHTLY)])
def test_a_pause_stops_what_every_server_runs(front_end: FrontEnd, mode: str) -> None:
    name = f"stopped-{mode}"
    front_end.publish(name, "sql")
    front_end.is_everywhere(name, "sql")

    async def paused_in_the_midst() -> list[asyncio.Task[Stream]]:
        while True:
            running = await begun(front_end, name)
            paused = await asyncio.to_thread(front_end.done, "POST", f"/v1/loras/{name}/pause", mode=mode)
            assert paused["status"] == "success"
            view = await asyncio.to_thread(front_end.view, name)
            assert (view["state"], view["requests_in_flight"]) == ("paused", 0)
            if mode == "keep" and view["requests_held"]:
                return running
            assert not view["requests_held"]
            await asyncio.gather(*running)  # they end without the resume
            if mode != "keep":
                return running
            # The answers were faster than the pause.
            await asyncio.to_thread(front_end.done, "POST", f"/v1/loras/{name}/resume")

    async def run() -> list[Stream]:
        running = await paused_in_the_midst()
        await asyncio.to_thread(front_end.done, "POST", f"/v1/loras/{name}/resume")
        return list(await asyncio.gather(*running))

    stopped = asyncio.run(run())
    assert {answer.server for answer in stopped} == front_end.every
    assert all(answer.ids[:MAX_TOKENS] == front_end.bed.answers["sql"][: len(answer.ids)] for answer in stopped)
    if mode == "abort":
        assert any(answer.reason == "abort" for answer in stopped)
    else:
        assert {(answer.reason, len(answer.ids)) for answer in stopped} == {("length", LONG)}, "nothing is lost"
    front_end.is_everywhere(name, "sql")


@NIGHTLY
def test_a_pause_waits_for_beams_whichever_engine_gets_them(front_end: FrontEnd, kind: Kind) -> None:
    """vLLM sends each token of beams to the engine with the fewest requests, so the beams change engines here."""
    name = "beams"
    front_end.publish(name, "sql")
    front_end.is_everywhere(name, "sql")

    async def load(engine: int) -> list[asyncio.Task[Stream]]:
        base, began = str(front_end.bed.base), [asyncio.get_running_loop().create_future() for _ in range(12)]
        streams = [asyncio.create_task(streamed(front_end, base, 3 * LONG, began=it, engine=engine)) for it in began]
        await asyncio.gather(*began)
        return streams

    async def end(streams: list[asyncio.Task[Stream]]) -> None:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def run() -> httpx.Response:
        loads, before = await load(kind.engines - 1), ended_parts(front_end)
        beams = asyncio.create_task(front_end.asked(name, max_tokens=60, n=2, use_beam_search=True))
        while await asyncio.to_thread(ended_parts, front_end) < before + 4:  # no streams end meanwhile
            assert not beams.done()
        pausing = asyncio.create_task(asyncio.to_thread(front_end.done, "POST", f"/v1/loras/{name}/pause"))
        while (await asyncio.to_thread(front_end.view, name))["state"] != "paused":
            await asyncio.sleep(0)
        others = await load(0)
        await end(loads)
        assert (await pausing)["status"] == "success"
        async with asyncio.timeout(LONGEST_S):
            answer = await beams
        await end(others)
        return answer

    try:
        answer = asyncio.run(run())
    finally:
        front_end.done("POST", f"/v1/loras/{name}/resume")
    assert [len(choice["token_ids"]) for choice in answer.json()["choices"]] == [60, 60]
    front_end.is_everywhere(name, "sql")


@NIGHTLY
def test_an_abort_ends_beams_whichever_engine_gets_them(front_end: FrontEnd, kind: Kind) -> None:
    """Aborts come while a token's parts run, and while the next parts are on their way, perhaps to another engine."""
    name = "aborted-beams"
    front_end.publish(name, "sql")
    front_end.is_everywhere(name, "sql")

    async def run() -> list[httpx.Response]:
        before = ended_parts(front_end)
        asked = [front_end.asked(name, max_tokens=200, n=3, use_beam_search=True) for _ in range(4 * kind.engines)]
        beams = [asyncio.create_task(one) for one in asked]
        while await asyncio.to_thread(ended_parts, front_end) < before + 8 * len(beams):
            assert not any(one.done() for one in beams)
        await asyncio.to_thread(front_end.done, "POST", f"/v1/loras/{name}/pause", mode="abort")
        async with asyncio.timeout(LONGEST_S):
            return list(await asyncio.gather(*beams))

    for _ in range(5):
        try:
            answers = asyncio.run(run())
        finally:
            front_end.done("POST", f"/v1/loras/{name}/resume")
        choices = [choice for answer in answers for choice in answer.json()["choices"]]
        assert {choice["finish_reason"] for choice in choices} == {"abort"}
        assert all(len(choice["token_ids"]) < 200 for choice in choices)
    front_end.is_everywhere(name, "sql")


# --- policy ---


def test_a_tenant_sees_its_own_adapters_only(front_end: FrontEnd) -> None:
    front_end.publish("team-a-poet", "chat")  # of nobody but the operators
    shutil.copytree(front_end.bed.adapters / "sql", front_end.root / "team-a" / "sql", dirs_exist_ok=True)
    assert all(tokens(it) == front_end.bed.answers["sql"] for it in front_end.everywhere("team-a/sql", key=TENANT))
    unknown = front_end.is_nowhere("team-a/none", key=TENANT).replace("team-a/none", "<name>")
    for name in ("chat", "team-a-poet", "nobody"):
        assert front_end.is_nowhere(name, key=TENANT).replace(name, "<name>") == unknown
    front_end.is_nowhere("team-a/sql", 401, key="nobodys")


@NIGHTLY
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/loras"),
        ("POST", "/v1/loras/sql/refresh"),
        ("DELETE", "/v1/loras/sql"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
    ],
)
def test_only_administrators_administer_at_every_server(front_end: FrontEnd, method: str, path: str) -> None:
    body = {"lora_name": "sql", "lora_path": "/x"}
    for key, status in ((TENANT, 403), ("nobodys", 401)):
        for _ in range(8):  # on new connections
            refused = httpx.request(method, f"{front_end.server.url}{path}", json=body, timeout=LONGEST_S,
                                    headers={"Authorization": f"Bearer {key}"})  # fmt: skip
            assert refused.status_code == status
    front_end.is_everywhere("sql", "sql")


def test_a_tenant_has_one_share_of_all_servers(front_end: FrontEnd) -> None:
    """It may use one adapter at once, so no answer for another of its own begins before the last of the first ends."""
    for name in ("one", "other"):
        shutil.copytree(front_end.bed.adapters / "sql", front_end.root / "team-a" / name, dirs_exist_ok=True)
        front_end.everywhere(f"team-a/{name}", key=TENANT, max_tokens=1)

    async def run() -> tuple[list[Stream], list[Stream]]:
        running = await begun(front_end, "team-a/one", key=TENANT)
        waiting = [
            asyncio.create_task(streamed(front_end, "team-a/other", key=TENANT, max_tokens=1)) for _ in range(12)
        ]
        return await asyncio.gather(*running), await asyncio.gather(*waiting)

    first, other = asyncio.run(run())
    assert {one.server for one in other} == {one.server for one in first} == front_end.every
    # Of two connections the client may read the later one first; the first answers take seconds.
    assert max(one.ended_at for one in first) - 0.2 < min(one.began_at for one in other)


# --- ends, and starts again ---


def test_all_that_ran_has_broken_nothing(front_end: FrontEnd) -> None:
    for sign in ("EngineDeadError", "EngineCore encountered a fatal error", "Task exception was never retrieved"):
        assert sign not in front_end.server.log()


def test_a_killed_follower_leaves_the_others_serving(front_end: FrontEnd) -> None:
    if len(front_end.every) < 2:
        pytest.skip("the only API server")
    killed = max(front_end.every - {front_end.leader()})

    async def run() -> tuple[list[Any], list[httpx.Response]]:
        running = await begun(front_end, "sql")
        os.kill(int(killed), signal.SIGKILL)
        ends = await asyncio.gather(*running, return_exceptions=True)
        answers = [await asyncio.gather(*(front_end.asked("sql") for _ in range(10))) for _ in range(10)]
        return ends, [answer for of_ten in answers for answer in of_ten]

    ends, answers = asyncio.run(run())
    front_end.every.discard(killed)
    # A stream of the killed server may have ended before the kill.
    assert {end.server for end in ends if isinstance(end, Stream)} >= front_end.every
    assert any(isinstance(end, httpx.HTTPError) for end in ends)
    assert {answer.headers[WHICH] for answer in answers} == front_end.every
    assert all(tokens(answer) == front_end.bed.answers["sql"] for answer in answers)
    digest = put(front_end, "after", "chat").raise_for_status().json()["digest"]
    front_end.is_everywhere("after", "chat", digest)
    assert f"(PID: {killed}) died with exit code -9: its requests fail" in front_end.server.log()


def test_after_a_kill_all_end_and_the_restart_forgets_nothing(
    front_end: FrontEnd, kind: Kind, home: Path, bed: Bed
) -> None:
    """The last of a front end. Without the first API server none serves, however the first has ended."""
    kept = front_end.publish("kept", "sql", below=front_end.allowed)
    front_end.done("POST", "/v1/loras", {"lora_name": "kept", "source": {"uri": kept.as_uri()}})
    front_end.done("POST", "/v1/loras/kept/pin")
    old = put(front_end, "rolled", "sql").raise_for_status().json()["digest"]
    newer = put(front_end, "rolled", "wide").raise_for_status().json()["digest"]
    front_end.done("DELETE", "/v1/loras/chat", block=True)
    front_end.done("POST", "/v1/loras/rolled/rollback")
    front_end.done("POST", "/v1/loras/rolled/pause")  # ends with the engine: the restart serves it
    killed = front_end.leader() if kind.count > 1 else max(front_end.every)

    async def run() -> list[Any]:
        running = await begun(front_end, "kept")
        held = [asyncio.create_task(front_end.asked("rolled")) for _ in range(4)]
        while (await asyncio.to_thread(front_end.view, "rolled"))["requests_held"] < len(held):
            await asyncio.sleep(0.05)
        os.kill(int(killed), signal.SIGKILL)
        ends = await asyncio.gather(*held, return_exceptions=True)
        assert all(isinstance(end, httpx.HTTPError) or end.status_code >= 500 for end in ends), ends
        return await asyncio.gather(*running, return_exceptions=True)

    ends = asyncio.run(run())
    assert all(isinstance(end, Stream | httpx.HTTPError) for end in ends), ends
    assert all(end.ids[:MAX_TOKENS] == bed.answers["sql"] for end in ends if isinstance(end, Stream))
    ended(front_end)
    if kind.count > 1:
        assert f"(PID: {killed}) died with exit code" in front_end.server.log()
    with opened(kind, bed, home, LORA_PLUGINS_RESTORE="1") as again:
        again.is_everywhere("kept", "sql", of_files(kept))
        assert again.view("kept")["pinned"]
        again.is_everywhere("rolled", "sql", old)
        again.is_everywhere(f"rolled@{old}", "sql", old)
        again.is_everywhere(f"rolled@{newer[:12]}", "wide", newer)
        assert again.view("rolled")["state"] == "serving"
        again.is_nowhere("chat", says="blocked")
        if kind.count > 1:
            os.kill(int(again.leader()), signal.SIGTERM)  # ends with exit code 0
            ended(again)


def ended(front_end: FrontEnd) -> None:
    """Wait until vllm serve has ended."""
    ends_at = time.monotonic() + LONGEST_S
    while front_end.server.process.poll() is None:
        assert time.monotonic() < ends_at, front_end.server.log()[-2000:]
        time.sleep(0.2)


@dataclass(frozen=True)
class Stream:
    """A whole streamed answer, who has sent it, and when its first and last bytes came."""

    server: str
    digest: str | None
    ids: list[int]
    reason: str | None
    began_at: float
    ended_at: float


async def streamed(
    front_end: FrontEnd,
    name: str,
    max_tokens: int = LONG,
    *,
    key: str = KEY,
    began: asyncio.Future[str] | None = None,
    engine: int | None = None,
) -> Stream:
    body = {"model": name, "prompt": PROMPT, "max_tokens": max_tokens, "stream": True, **GREEDY}
    headers, ids, reason = {"Authorization": f"Bearer {key}"}, list[int](), None
    headers |= {} if engine is None else {"X-data-parallel-rank": str(engine)}
    try:
        async with (
            front_end.connected(headers) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            began_at = time.monotonic()
            assert answer.status_code == 200, await answer.aread()
            if began is not None:
                began.set_result(answer.headers[WHICH])
            async for said in events(answer):
                if "error" in said:  # the last word of a stream whose engine crashes
                    raise httpx.RemoteProtocolError(str(said["error"]))
                (choice,) = said["choices"]
                ids += choice["token_ids"] or []
                reason = choice["finish_reason"] or reason
            server, digest = answer.headers[WHICH], answer.headers.get(HEADER)
            return Stream(server, digest, ids, reason, began_at, time.monotonic())
    except BaseException as error:
        if began is not None and not began.done():
            began.set_exception(error)
        raise


async def begun(front_end: FrontEnd, name: str, *, key: str = KEY) -> list[asyncio.Task[Stream]]:
    """Long answers that go on, from every API server at least one."""
    running, servers = list[asyncio.Task[Stream]](), set[str]()
    while servers != front_end.every:
        started = [asyncio.get_running_loop().create_future() for _ in range(4)]
        running += [asyncio.create_task(streamed(front_end, name, key=key, began=it)) for it in started]
        servers |= set(await asyncio.gather(*started))
    return running
