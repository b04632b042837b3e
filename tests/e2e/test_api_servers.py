"""Several API servers of one deployment serve the same: names, versions, blocks and pins, as soon as one has answered.

Real servers: three API servers before one engine, and data parallelism as `vllm serve` starts it. Requests come on new
connections, so that each API server is asked; each answer says which has sent it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lora_plugins.server.response import HEADER
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import connect
from testbed.models import PROMPT
from testbed.which_server import HEADER as WHICH
from tests.e2e.admin import Admin
from tests.e2e.digests import of_files
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

WAYS = {"three API servers": ("--api-server-count", "3"), "two engines": ("--data-parallel-size", "2")}
COUNTS = {"three API servers": 3, "two engines": 2}
CELLS = {"three API servers": "several API servers", "two engines": "data parallel, several API servers"}
_every: dict[str, set[str]] = {}  # the API servers, by the address that they share
SAID = "names, swaps, pushes, pins, unloads and blocks are the same on each"


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, id=way, marks=pytest.mark.deployment(CELLS[way], "tested", SAID)) for way in WAYS],
)
def admin(request: pytest.FixtureRequest, bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    home = tmp_path_factory.mktemp("api-servers")
    (home / "metrics").mkdir()
    shutil.copytree(bed.adapters, home / "adapters")
    with admin_server(
        bed, home, "--max-loras", "2", "--middleware", "testbed.which_server.SayWhichServer", *WAYS[request.param],
        # vLLM makes one before it spawns its API servers; a forked one has imported prometheus_client before.
        PROMETHEUS_MULTIPROC_DIR=str(home / "metrics"),
    ) as server:  # fmt: skip
        admin = Admin(server, connect(server), bed, home / "adapters", home)
        _every[server.url] = asyncio.run(_all_started(admin, COUNTS[request.param]))
        yield admin


async def _all_started(admin: Admin, count: int) -> set[str]:
    """Wait until each API server listens: the port answers as soon as one does."""
    every: set[str] = set()
    async with asyncio.timeout(LONGEST_S):
        while admin.server.log().count("Application startup complete") < count:
            await asyncio.sleep(0.2)
        while len(every) < count:
            every |= set(await by_server(admin, None))
    return every


async def asked(admin: Admin, name: str | None, *, max_tokens: int = MAX_TOKENS) -> httpx.Response:
    """One greedy completion on a connection of its own."""
    body: dict[str, Any] = {
        "model": name or str(admin.bed.base), "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=admin.server.url, timeout=LONGEST_S) as client:
        return await client.post("/v1/completions", json=body)


async def by_server(
    admin: Admin, name: str | None, *, count: int = 12, max_tokens: int = 1
) -> dict[str, list[httpx.Response]]:
    """The answers to several requests at once, by the API server that has sent them."""
    answers: dict[str, list[httpx.Response]] = defaultdict(list)
    for answer in await asyncio.gather(*(asked(admin, name, max_tokens=max_tokens) for _ in range(count))):
        answers[answer.headers[WHICH]].append(answer)
    return answers


def servers(admin: Admin) -> set[str]:
    """Every API server of the deployment."""
    return _every[admin.server.url]


def everywhere(admin: Admin, name: str) -> list[httpx.Response]:
    """Answers for a name from every API server."""
    answers: dict[str, list[httpx.Response]] = defaultdict(list)
    every = servers(admin)
    for _ in range(20):
        for server, some in asyncio.run(by_server(admin, name, max_tokens=MAX_TOKENS)).items():
            answers[server] += some
        if answers.keys() == every:
            return [answer for some in answers.values() for answer in some]
    raise AssertionError(f"only {answers.keys()} of {every} were asked")


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def test_there_are_as_many_servers_as_asked_for(admin: Admin, request: pytest.FixtureRequest) -> None:
    assert len(servers(admin)) == COUNTS[request.node.callspec.params["admin"]]


def test_every_server_answers_an_unknown_name_with_the_same_version(admin: Admin) -> None:
    for name in ("sql", "chat", "team/poet"):
        for answer in everywhere(admin, name):
            assert tokens(answer) == admin.bed.answers[name]
            assert answer.headers[HEADER] == of_files(admin.root / name)
    served = {one["lora_name"] for one in admin.done("GET", "/v1/loras")["loras"]}
    assert {"sql", "chat", "team/poet"} <= served
    assert all(answer.status_code == 404 for answer in everywhere(admin, "nobody"))


def test_every_server_lists_the_same(admin: Admin) -> None:
    everywhere(admin, "sql")
    listed = [admin.done("GET", path) for path in ("/v1/models", "/v1/loras") for _ in range(8)]
    names = [[one.get("id") or one.get("lora_name") for one in it.get("data") or it["loras"]] for it in listed]
    assert all("sql" in of_one for of_one in names)
    assert len({tuple(of_one) for of_one in names[:8]}) == len({tuple(of_one) for of_one in names[8:]}) == 1
    roots = {one["root"] for it in listed[:8] for one in it["data"] if one["id"] == "sql"}
    assert len(roots) == 1


def test_after_a_swap_every_server_answers_with_the_new_version(admin: Admin) -> None:
    every = servers(admin)
    for number, original in enumerate(["sql", "chat"] * 3):
        admin.publish("swapped", original, number)
        change = admin.done("POST", "/v1/loras", {"lora_name": "swapped"}) if not number else admin.done(
            "POST", "/v1/loras/swapped/refresh"
        )  # fmt: skip
        digest = of_files(admin.root / "swapped")
        assert change["digest"] == digest
        answers = asyncio.run(by_server(admin, "swapped", max_tokens=MAX_TOKENS))
        assert len(answers) > 1
        assert answers.keys() <= every
        for answer in (answer for some in answers.values() for answer in some):
            assert answer.headers[HEADER] == digest
            assert tokens(answer) == admin.bed.answers[original]


def test_answers_during_swaps_are_of_the_version_in_the_header(admin: Admin) -> None:
    admin.publish("beside", "sql", 100)
    originals = {of_files(admin.root / "beside"): "sql"}
    admin.done("POST", "/v1/loras", {"lora_name": "beside"})

    async def swaps_and_answers() -> tuple[list[httpx.Response], list[tuple[int, str]]]:
        answers: list[httpx.Response] = []
        begun_before: list[tuple[int, str]] = []  # after each swap's answer: where later answers begin, and the digest
        is_over = False

        async def keep_asking() -> None:
            while not is_over:
                answers.append(await asked(admin, "beside"))

        askers = [asyncio.create_task(keep_asking()) for _ in range(6)]
        for number, original in enumerate(["chat", "wide", "sql", "stable"] * 2):
            await asyncio.to_thread(admin.publish, "beside", original, number)
            digest = of_files(admin.root / "beside")
            originals[digest] = original
            change = await asyncio.to_thread(admin.done, "POST", "/v1/loras/beside/refresh")
            assert change["digest"] == digest
            fresh = await asyncio.gather(*(asked(admin, "beside") for _ in range(6)))
            begun_before += [(number, digest) for answer in fresh if answer.headers[HEADER] != digest]
            answers += fresh
        is_over = True
        await asyncio.gather(*askers)
        return answers, begun_before

    answers, stale = asyncio.run(swaps_and_answers())
    assert stale == []
    assert len({answer.headers[WHICH] for answer in answers}) == len(servers(admin))
    wrong = [answer for answer in answers if tokens(answer) != admin.bed.answers[originals[answer.headers[HEADER]]]]
    assert wrong == []


def test_what_is_unloaded_or_blocked_is_so_on_every_server(admin: Admin) -> None:
    admin.publish("gone", "sql")
    assert admin.done("POST", "/v1/loras", {"lora_name": "gone"})["digest"] == of_files(admin.root / "gone")
    assert all(tokens(answer) == admin.bed.answers["sql"] for answer in everywhere(admin, "gone"))
    admin.done("DELETE", "/v1/loras/gone", block=True)
    assert {answer.status_code for answer in everywhere(admin, "gone")} == {404}
    admin.done("POST", "/v1/loras", {"lora_name": "gone"})
    assert {answer.status_code for answer in everywhere(admin, "gone")} == {200}
    shutil.rmtree(admin.root / "gone")
    admin.done("DELETE", "/v1/loras/gone")
    assert {answer.status_code for answer in everywhere(admin, "gone")} == {404}


def push(admin: Admin, name: str, original: str) -> dict[str, Any]:
    """Send an adapter as the next version of a name, on a new connection."""
    directory = admin.bed.adapters / original
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = {file: (file, (directory / file).read_bytes()) for file in names}
    answer = httpx.put(f"{admin.server.url}/v1/loras/{name}", files=files, timeout=LONGEST_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_push_a_pin_and_a_rollback_reach_every_server(admin: Admin) -> None:
    digests = {push(admin, "pushed", "sql")["digest"] for _ in range(4)}  # whichever server takes it
    assert len(digests) == 1
    admin.done("POST", "/v1/loras/pushed/pin")
    for answer in everywhere(admin, "pushed"):
        assert ({answer.headers[HEADER]}, tokens(answer)) == (digests, admin.bed.answers["sql"])
    view = admin.view("pushed")
    assert view["pinned"]
    assert view["last_used_at"] is not None
    assert push(admin, "pushed", "chat")["swapped"]
    assert all(tokens(answer) == admin.bed.answers["chat"] for answer in everywhere(admin, "pushed"))
    assert {admin.done("POST", "/v1/loras/pushed/rollback")["digest"]} == digests
    assert all(tokens(answer) == admin.bed.answers["sql"] for answer in everywhere(admin, "pushed"))
    admin.done("POST", "/v1/loras/pushed/unpin")


def test_vllms_own_endpoints_reach_every_server(admin: Admin) -> None:
    path = str(admin.bed.adapters / "stable")
    for _ in range(3):
        loaded = admin.call("POST", "/v1/load_lora_adapter", {"lora_name": "by-path", "lora_path": path})
        assert loaded.status_code == 200, loaded.text
        assert all(tokens(answer) == admin.bed.answers["stable"] for answer in everywhere(admin, "by-path"))
        again = admin.call("POST", "/v1/load_lora_adapter", {"lora_name": "by-path", "lora_path": path})
        assert again.status_code == 400
        gone = admin.call("POST", "/v1/unload_lora_adapter", {"lora_name": "by-path"})
        assert gone.status_code == 200, gone.text
        assert {answer.status_code for answer in everywhere(admin, "by-path")} == {404}


def test_vllm_ends_every_server_where_one_is_killed(admin: Admin) -> None:
    """The last test: with it the server ends. vLLM starts none again, so nothing is served that has been forgotten."""
    killed = max(servers(admin), key=int)
    os.kill(int(killed), signal.SIGKILL)
    ends_at = time.monotonic() + LONGEST_S
    while admin.server.process.poll() is None:
        assert time.monotonic() < ends_at, admin.server.log()[-2000:]
        time.sleep(0.2)
    assert f"(PID: {killed}) died with exit code" in admin.server.log()
