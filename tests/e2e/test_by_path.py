"""vLLM's own ways in, by a path: whatever becomes of the files, each answer is that of a version that was loaded.

One server with one slot; its prefix cache keeps most of the prompts, so that what is kept of other weights is seen.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from testbed.bed import MAX_TOKENS, Bed
from testbed.events import events_of
from testbed.hub import Hub, local_hub
from testbed.models import edit_config
from testbed.reference import Reference
from testbed.server import Server
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S
from tests.repetitions import times

PREFIX = "The quick brown fox jumps over the lazy dog. def shrink(x, a): return x @ a.T; " * 4
PROMPTS = [f"{PREFIX}{end}" for end in ("The quick brown fox", "A request names an adapter", "def shrink(x, a)")]
VERSIONS = ("sql", "chat", "stable")
LOADS = times(2000, short=12)
STREAMS = 4
LONG_TOKENS = 900  # two seconds or three, in which a version is loaded
ARGUMENTS = ("--max-loras", "1", "--max-cpu-loras", "3", "--block-size", "32", "--num-gpu-blocks-override", "96")


@dataclass(frozen=True)
class Served:
    """The server, its folder, and PEFT's answer to each prompt for each adapter that is a version here."""

    server: Server
    bed: Bed
    home: Path
    answers: dict[tuple[str, str], list[int]]
    hub: Hub

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return httpx.request(method, f"{self.server.url}{path}", json=body, headers=headers, timeout=LONGEST_S)

    def put(self, directory: Path, version: str, number: int = 0) -> Path:
        """Write this version's files over those that are there, as a trainer does that saves to one path."""
        shutil.copytree(self.bed.adapters / version, directory, dirs_exist_ok=True)
        edit_config(directory, revision=f"{number}")
        return directory

    def load(self, name: str, directory: Path, *, in_place: bool = False) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(directory), "load_inplace": in_place}
        answer = self.call("POST", "/v1/load_lora_adapter", body)
        assert answer.status_code == 200, answer.text
        return answer

    def ask(self, name: str, prompt: str = PROMPTS[0]) -> httpx.Response:
        answer = self.call("POST", "/v1/completions", body_of(name, prompt))
        assert answer.status_code == 200, answer.text
        return answer

    def answers_like(self, name: str, version: str) -> None:
        for prompt in PROMPTS:
            assert tokens_of(self.ask(name, prompt)) == self.answers[version, prompt], version

    def view(self, name: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/loras/{name}").json())

    def push_out(self, *names: str) -> None:
        for other in ("wide", "team/poet", "chat"):
            self.ask(other)
        for name in names:
            assert "host" not in self.view(name)["tiers"]


def body_of(name: str, prompt: str, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    fixed = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": name, "prompt": prompt, **fixed}


def tokens_of(answer: httpx.Response) -> list[int]:
    return list(answer.json()["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def served(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("by-path")
    shutil.copytree(bed.adapters, home / "adapters")
    reference = Reference(bed.base)
    answers = {
        (version, prompt): reference.generate(bed.adapters / version, reference.prompt_ids(prompt), MAX_TOKENS)
        for version in VERSIONS
        for prompt in PROMPTS
    }
    assert len(reference.prompt_ids(PREFIX)) > 100
    assert len({tuple(ids) for ids in answers.values()}) == len(answers), "a mix-up would not be seen"
    with local_hub() as hub, admin_server(bed, home, *ARGUMENTS, **hub.env(home / "hf")) as server:
        yield Served(server, bed, home, answers, hub)


def test_new_files_loaded_in_place_answer_as_peft_does(served: Served, tmp_path: Path) -> None:
    for step, version in enumerate(VERSIONS):
        directory = served.put(tmp_path / "policy", version)
        served.load("policy", directory, in_place=step > 0)
        served.answers_like("policy", version)
        assert served.view("policy")["path"] != str(directory)
    (root,) = [card["root"] for card in served.call("GET", "/v1/models").json()["data"] if card["id"] == "policy"]
    assert root == str(tmp_path / "policy"), "where the operator has it"


def test_a_hub_id_is_verified_and_answers_with_its_digest(served: Served) -> None:
    for step, version in enumerate(VERSIONS[:2]):
        files = {path.name: path.read_bytes() for path in (served.bed.adapters / version).iterdir()}
        served.hub.commit("team/by-id", files)
        served.load("by-id", Path("team/by-id"), in_place=step > 0)
        served.answers_like("by-id", version)
        view = served.view("by-id")
        assert served.ask("by-id").headers["x-lora-digest"] == view["digest"] == Path(view["path"]).name
    (root,) = [card["root"] for card in served.call("GET", "/v1/models").json()["data"] if card["id"] == "by-id"]
    assert root == "team/by-id"
    served.hub.commit("team/condemned", files | {CONFIG_FILE: b"{"})
    weights = os.path.relpath(served.bed.adapters / VERSIONS[0] / WEIGHTS_FILE)  # a file, in the place of its directory
    for path, status, says in (
        ("team/condemned", 400, CONFIG_FILE),
        ("team/none", 503, "L006"),
        ("x", 400, "org/"),
        (weights, 404, "Not a directory"),
    ):
        answer = served.call("POST", "/v1/load_lora_adapter", {"lora_name": "refused", "lora_path": path})
        assert (answer.status_code, says in answer.text) == (status, True), answer.text
    fetched = {request.path.rpartition("/")[2] for request in served.hub.requests() if "team/condemned" in request.path}
    assert WEIGHTS_FILE not in fetched


@pytest.mark.parametrize("becomes", ["overwritten", "deleted"])
def test_what_becomes_of_the_files_changes_no_answer(served: Served, tmp_path: Path, becomes: str) -> None:
    directory = served.put(tmp_path / becomes, "sql")
    served.load(becomes, directory)
    if becomes == "deleted":
        shutil.rmtree(directory)
    else:
        served.put(directory, "stable")
    served.answers_like(becomes, "sql")
    served.push_out(becomes)
    served.answers_like(becomes, "sql")


def test_versions_by_path_are_stamped_refreshed_and_rolled_back(served: Served, tmp_path: Path) -> None:
    name = "any name"
    directory = served.put(tmp_path / "stamped", "sql", 99)  # bytes that no other name has
    served.load(name, directory)
    first = served.view(name)
    assert (first["source"], first["uri"], first["digest"]) == (
        "filesystem",
        directory.as_uri(),
        first["pinned_digest"],
    )
    assert served.ask(name).headers["x-lora-digest"] == first["digest"]
    served.put(directory, "chat")
    assert served.call("POST", f"/v1/loras/{name}/refresh", **{"If-Match": "0" * 64}).status_code == 412
    refreshed = served.call("POST", f"/v1/loras/{name}/refresh", **{"If-Match": first["digest"]}).json()
    assert (refreshed["swapped"], refreshed["previous_digest"]) == (True, first["digest"])
    served.answers_like(name, "chat")
    served.put(directory, "stable")
    served.load(name, directory, in_place=True)
    served.answers_like(name, "stable")
    assert served.view(name)["previous_digests"] == [refreshed["digest"], first["digest"]]
    for version, digest in (("chat", refreshed["digest"]), ("sql", first["digest"])):
        assert served.call("POST", f"/v1/loras/{name}/rollback", {"digest": digest}).json()["digest"] == digest
        served.answers_like(name, version)
        assert served.ask(name).headers["x-lora-digest"] == digest
    leases = served.home / "store" / ".leases" / first["digest"]
    assert list(leases.iterdir())
    assert served.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}).status_code == 200
    until = time.monotonic() + 60
    while list(leases.iterdir()):
        assert time.monotonic() < until, "the store may remove it"
        time.sleep(0.05)


def test_a_refresh_moves_what_runs_where_asked(served: Served, tmp_path: Path) -> None:
    directory = served.put(tmp_path / "moving", "sql")
    served.load("moving", directory)
    first = served.view("moving")["digest"]
    served.ask("moving")
    long = body_of("moving", PROMPTS[0], LONG_TOKENS)
    with ThreadPoolExecutor() as threads:
        streamed = threads.submit(served.call, "POST", "/v1/completions", {**long, "stream": True})
        running = threads.submit(served.call, "POST", "/v1/completions", long)
        while served.view("moving")["requests_in_flight"] < 2:
            assert not running.done()
        served.put(directory, "chat")
        moved = served.call("POST", "/v1/loras/moving/refresh", {"running": "inflight"})
        second = moved.json()["digest"]
        late = served.ask("moving")
        assert not running.done(), "what came later is answered beside it, in the one slot"
        answer = running.result()
    (began_with, began_at), (went_on_with, moved_at) = answer.json()["kv_transfer_params"]["lora_versions"]
    assert (began_with, began_at, went_on_with) == (first, 0, second)
    assert answer.headers["x-lora-digest"] == streamed.result().headers["x-lora-digest"] == first
    chunks = events_of(streamed.result().content)
    said = [chunk.get("kv_transfer_params") for chunk in chunks]
    assert said[0] is None
    assert [version for version, _ in said[-1]["lora_versions"]] == [first, second]
    assert (late.headers["x-lora-digest"], tokens_of(late)) == (second, served.answers["chat", PROMPTS[0]])
    reference = Reference(served.bed.base)
    paths = (served.bed.adapters / "sql", served.bed.adapters / "chat")
    prompt_ids = reference.prompt_ids(PROMPTS[0])
    compared = moved_at + MAX_TOKENS
    assert tokens_of(answer)[:compared] == reference.moved(*paths, prompt_ids, moved_at, compared)
    back = served.call("POST", "/v1/loras/moving/rollback", {"running": "inflight"})
    assert back.json()["digest"] == first
    served.answers_like("moving", "sql")


def test_loads_in_place_under_load_mix_no_versions(served: Served, tmp_path: Path) -> None:
    """`LONG_TESTS=1`: 2,000 of them."""
    version_of: dict[str, str] = {}
    answers: list[tuple[str, str, list[int]]] = []
    directory = tmp_path / "under-load"

    async def load(client: httpx.AsyncClient, number: int) -> None:
        version = VERSIONS[number % len(VERSIONS)]
        await asyncio.to_thread(served.put, directory, version, number)
        body = {"lora_name": "under-load", "lora_path": str(directory), "load_inplace": number > 0}
        loaded = await client.post("/v1/load_lora_adapter", json=body)
        assert loaded.status_code == 200, loaded.text
        version_of[(await client.get("/v1/loras/under-load")).json()["digest"]] = version

    async def traffic(client: httpx.AsyncClient, prompt: str, done: asyncio.Event) -> None:
        while not done.is_set():
            answer = await client.post("/v1/completions", json=body_of("under-load", prompt))
            assert answer.status_code == 200, answer.text
            answers.append((answer.headers["x-lora-digest"], prompt, tokens_of(answer)))

    async def both() -> None:
        done = asyncio.Event()
        async with httpx.AsyncClient(base_url=served.server.url, timeout=LONGEST_S) as client:
            await load(client, 0)
            async with asyncio.TaskGroup() as group:
                for stream in range(STREAMS):
                    group.create_task(traffic(client, PROMPTS[stream % len(PROMPTS)], done))
                for number in range(1, LOADS):
                    await load(client, number)
                done.set()

    asyncio.run(both())
    wrong = [one for one in answers if one[2] != served.answers[version_of[one[0]], one[1]]]
    assert (wrong, len(answers) > LOADS / 10) == ([], True)
    assert len({digest for digest, _, _ in answers}) > min(10, LOADS / 10), "too few versions have answered"
