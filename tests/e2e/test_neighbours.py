"""vLLM's own ways of serving adapters go on working beside ours, and `/v1/models` says where each comes from."""

from __future__ import annotations

from pathlib import Path

import httpx

from testbed.bed import MAX_TOKENS
from testbed.client import complete
from testbed.models import PROMPT
from tests.e2e.conftest import World


def test_log_says_which_resolver_is_in_charge(world: World) -> None:
    lines = [line for line in world.server.log().splitlines() if "resolves unknown model names from" in line]
    assert len(lines) == 1
    assert f"filesystem ({world.root})" in lines[0]
    assert "lora-plugins" in lines[0]
    assert "largest rank 64" in lines[0]


def test_models_show_lineage(world: World) -> None:
    assert complete(world.client, "team/poet", PROMPT, 1).status == 200
    cards = {card.id: card for card in world.client.models.list()}
    assert Path(cards["team/poet"].root).parent == world.store
    assert cards["team/poet"].parent == world.base
    assert cards[world.base].parent is None


def test_broken_names_are_not_listed(world: World) -> None:
    complete(world.client, "dora", PROMPT, 1)
    assert "dora" not in {card.id for card in world.client.models.list()}


def test_static_module_answers(world: World) -> None:
    assert list(complete(world.client, "static", PROMPT, MAX_TOKENS).token_ids) == world.bed.answers["sql"]


def test_load_and_unload_by_hand(world: World) -> None:
    url = f"{world.server.url}/v1"
    path = str(world.bed.adapters / "chat")
    loaded = httpx.post(f"{url}/load_lora_adapter", json={"lora_name": "by-hand", "lora_path": path}, timeout=240)
    assert loaded.status_code == 200, loaded.text
    assert list(complete(world.client, "by-hand", PROMPT, MAX_TOKENS).token_ids) == world.bed.answers["chat"]
    assert httpx.post(f"{url}/unload_lora_adapter", json={"lora_name": "by-hand"}, timeout=240).status_code == 200
    assert complete(world.client, "by-hand", PROMPT, 1).status == 404


def test_unloaded_adapter_is_resolved_again(world: World) -> None:
    assert complete(world.client, "stable", PROMPT, 1).status == 200
    unloaded = httpx.post(f"{world.server.url}/v1/unload_lora_adapter", json={"lora_name": "stable"}, timeout=240)
    assert unloaded.status_code == 200
    assert list(complete(world.client, "stable", PROMPT, MAX_TOKENS).token_ids) == world.bed.answers["stable"]
