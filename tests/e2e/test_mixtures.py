"""Mixtures by name answer as PEFT, to whoever may use all of their parts, and follow the parts."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file

from lora_plugins.client import push
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.mixtures import mixed_by_peft
from testbed.models import PROMPT, AdapterSpec, build_adapter
from testbed.reference import Reference
from testbed.server import Server
from testbed.trained_tokens import with_tokens
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

POLICY = """
[tenants.a]
keys = ["key-a"]
adapters = ["team-a/*", "shared"]
pushes = ["team-a/*"]
[tenants.operators]
keys = ["root"]
admin = true
"""
# Where each lies, and whose weights it has.
ADAPTERS = {"team-a/sql": "sql", "team-b/chat": "chat", "shared": "stable", "swapped": "sql", "gone": "chat"}
MIXTURES = [
    {"team-a/sql": 0.7, "shared": 0.3},
    {"team-a/sql": 1.5, "team-b/chat": -0.5},
    {"team-b/chat": 0.5},
    {"team-a/sql": 0.4, "team-b/chat": 0.4, "shared": 0.4},
]


@dataclass(frozen=True)
class Mixed:
    """The server, its home, and what PEFT answers."""

    server: Server
    bed: Bed
    home: Path
    reference: Reference

    def answer_of_peft(self, parts: dict[str, float]) -> list[int]:
        """By the parts' names; each is what lies there now."""
        of_bed = {self.home / "adapters" / name: weight for name, weight in parts.items()}
        target = self.home / "peft" / str(len(list(self.home.glob("peft/*"))))
        adapter = mixed_by_peft(self.reference, of_bed, target)
        return self.reference.generate(adapter, self.reference.prompt_ids(PROMPT), MAX_TOKENS)

    def call(self, method: str, path: str, key: str = "root", **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.server.url}{path}", headers=headers, timeout=LONGEST_S, **more)

    def ask(self, name: str, key: str = "root") -> httpx.Response:
        body = {"model": name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
        return self.call("POST", "/v1/completions", key, json=body | {"ignore_eos": True, "return_token_ids": True})

    def tokens(self, name: str) -> list[int]:
        answer = self.ask(name)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def mixed(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    home = tmp_path_factory.mktemp("mixed")
    for name, like in ADAPTERS.items():
        shutil.copytree(bed.adapters / like, home / "adapters" / name)
    build_adapter(bed.base, home / "adapters", AdapterSpec("rank-40", 40))
    (home / "policy.toml").write_text(POLICY)
    with admin_server(
        bed,
        home,
        *("--max-loras", "2", "--api-key", "key-a", "root"),
        LORA_PLUGINS_POLICY=str(home / "policy.toml"),
        LORA_PLUGINS_REVALIDATE_S="0",
    ) as server:
        yield Mixed(server, bed, home, Reference(bed.base))


def test_mixtures_answer_as_peft_beside_their_parts(mixed: Mixed) -> None:
    wanted = {"+".join(f"{it}*{of}" for it, of in parts.items()): mixed.answer_of_peft(parts) for parts in MIXTURES}
    wanted |= {name: mixed.bed.answers[ADAPTERS[name]] for name in ("team-a/sql", "team-b/chat", "shared")}
    wanted |= {str(mixed.bed.base): mixed.bed.answers[None]}
    assert len({tuple(ids) for ids in wanted.values()}) == len(wanted)

    async def all_at_once(names: list[str]) -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(mixed.tokens, name) for name in names))

    for name, found in zip([*wanted] * 2, asyncio.run(all_at_once([*wanted] * 2)), strict=True):
        assert found == wanted[name], name


def test_spellings_of_a_mixture_are_one_adapter(mixed: Mixed) -> None:
    answers = [mixed.ask(name) for name in ("team-a/sql*0.7+shared*0.3", "shared*0.30+team-a/sql*00.7")]
    assert len({answer.headers["x-lora-digest"] for answer in answers}) == 1
    assert {answer.json()["model"] for answer in answers} == {"shared*0.3+team-a/sql*0.7"}
    listed = {card["id"] for card in mixed.call("GET", "/v1/models").json()["data"]}
    assert [name for name in listed if "shared*0.3" in name] == ["shared*0.3+team-a/sql*0.7"]
    for path in ("/v1/loras/team-a/sql*0.70+shared*0.3", "/v1/models/team-a/sql*0.70+shared*0.3"):
        assert mixed.call("GET", path).status_code == 200


def test_a_tenant_needs_the_right_to_each_part(mixed: Mixed) -> None:
    assert mixed.ask("team-a/sql*0.7+shared*0.3", "key-a").status_code == 200
    mixed.tokens("team-a/sql*1+team-b/chat*1")  # served, by an operator
    digest = mixed.ask("team-a/sql*1+team-b/chat*1").headers["x-lora-digest"]
    for name in (
        "team-a/sql*1+team-b/chat*1",
        "team-b/chat*1+team-a/sql*1.0",
        f"team-a/sql*1+team-b/chat*1@{digest[:12]}",
        "team-a/nobody*1+team-b/chat*1",
    ):
        refused = mixed.ask(name, "key-a")
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].startswith(f"The model `{name}` does not exist")
    cards = mixed.call("GET", "/v1/models", "key-a").json()["data"]
    assert not [card for card in cards if "team-b" in card["id"]]


def test_no_adapter_of_its_own_gets_a_mixtures_name(mixed: Mixed) -> None:
    folder = mixed.bed.adapters / "sql"
    body = {"lora_name": "team-a/sql*0.5", "lora_path": str(folder)}
    by_path = mixed.call("POST", "/v1/load_lora_adapter", json=body)
    pushed = mixed.call("PUT", "/v1/loras/team-a/sql*0.5", content=b"x")
    by_uri = {"lora_name": "team-a/sql*0.5", "source": {"uri": folder.as_uri()}}
    for answer in (by_path, pushed, mixed.call("POST", "/v1/loras", json=by_uri)):
        assert answer.status_code == 400
        assert "the name of a mixture" in answer.text or "LORA_PLUGINS_ALLOWED_URIS" in answer.text
    assert mixed.call("PUT", "/v1/loras/team-a/sql*0.5", "key-a", content=b"x").status_code == 403


def test_a_push_of_a_part_gives_a_new_mixture(mixed: Mixed) -> None:
    """Also where the part was served from its source before, and with another spelling."""
    wanted = {like: mixed.answer_of_peft({name: 0.5}) for like, name in (("sql", "team-a/sql"), ("chat", "gone"))}
    assert mixed.tokens("swapped*0.5") == wanted["sql"]
    folder = mixed.bed.adapters / "chat"
    config = json.loads((folder / "adapter_config.json").read_text())
    for _ in range(2):
        push("swapped", load_file(folder / "adapter_model.safetensors"), config, servers=[mixed.server.url], key="root")
        assert mixed.tokens("swapped*0.50") == wanted["chat"]
        assert mixed.call("POST", "/v1/loras/swapped/refresh").status_code == 200
        assert mixed.tokens("swapped*0.5") == wanted["sql"]
    assert mixed.call("POST", "/v1/loras/swapped/rollback").status_code == 200
    assert mixed.tokens("swapped*0.5") == wanted["chat"], "the version served, and not the source's"


def test_a_block_of_a_part_takes_the_mixture_down(mixed: Mixed) -> None:
    assert mixed.tokens("gone*0.5+shared*1")
    assert mixed.call("DELETE", "/v1/loras/gone?block=true").status_code in (200, 404)
    refused = mixed.ask("gone*0.5+shared*1")
    assert refused.status_code == 404
    assert "load 'gone' again" in refused.text
    assert "gone*0.5+shared*1" not in {card["id"] for card in mixed.call("GET", "/v1/models").json()["data"]}
    assert mixed.call("POST", "/v1/loras", json={"lora_name": "gone"}).status_code == 200
    assert mixed.tokens("gone*0.5+shared*1")


def test_refusals_name_parts_ranks_and_kinds(mixed: Mixed) -> None:
    with_tokens(mixed.bed.adapters / "sql", mixed.home / "adapters" / "words", {"model.embed_tokens": [3, 5]}, 256)
    for name, status, texts in (
        ("team-a/sql*0.5+nobody*1", 404, ["no adapter 'nobody', a part of the mixture"]),
        ("rank-40*1+shared*0.5+team-b/chat*1", 400, ["rank ", "the sum of 40 of 'rank-40'", "--max-lora-rank"]),
        ("words*0.5", 400, ["'words' with token_adapter.trainable_tokens_delta"]),
        ("team-a/sql*0", 404, ["the weight 0 of 'team-a/sql'"]),
        ("team-a/sql*0.5+shared", 404, ["each of whose parts has a weight"]),
    ):
        answer = mixed.ask(name)
        assert answer.status_code == status, (name, answer.text)
        assert all(text in answer.text for text in texts), (name, answer.text)


def test_streams_and_pins_of_mixtures_work(mixed: Mixed) -> None:
    name = "shared*0.3+team-a/sql*0.7"
    streamed = complete(connect(mixed.server).with_options(api_key="root"), "team-a/sql*0.7+shared*0.30", PROMPT, 8)
    assert list(streamed.token_ids) == mixed.tokens(name)[:8]
    assert mixed.call("POST", "/v1/loras/team-a/sql*0.70+shared*0.3/pin").json()["lora_name"] == name
    assert mixed.call("POST", f"/v1/loras/{name}/unpin").status_code == 200
    assert mixed.call("POST", f"/v1/loras/{name}/rollback").status_code == 400
    assert mixed.call("DELETE", f"/v1/loras/{name}").status_code == 200
    assert mixed.tokens(name)
