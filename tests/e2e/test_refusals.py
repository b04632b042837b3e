"""What must not be served is refused with the right status and a text that helps, and nothing breaks."""

from __future__ import annotations

import httpx
import pytest

from testbed.bed import MAX_TOKENS
from testbed.client import complete
from testbed.models import PROMPT
from tests.e2e.broken import BROKEN, Broken
from tests.e2e.conftest import World


@pytest.mark.parametrize("mark", [":", "_", "/"])
def test_a_base_models_name_before_an_adapters_is_explained(world: World, mark: str) -> None:
    answer = complete(world.client, f"{world.base}{mark}sql", PROMPT, 1)
    assert answer.status == 404
    assert 'ask for "model": "sql"' in answer.error


@pytest.mark.parametrize("field", ["lora_adapter", "lora_request", "parameters.adapter_id", "nvext.adapter"])
def test_an_adapter_in_a_field_of_other_servers_is_refused(world: World, field: str) -> None:
    def asked(model: str, value: str) -> httpx.Response:
        holder, _, name = field.rpartition(".")
        held = {holder: {name: value}} if holder else {name: value}
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1, **held}
        return httpx.post(f"{world.server.url}/v1/completions", json=body, timeout=60)

    refused = asked(world.base, "sql")
    assert refused.status_code == 400
    for text in ("L003", f'"{field}": "sql"', 'send "model": "sql"', "LORA_PLUGINS_ADAPTER_FIELDS=ignore"):
        assert text in refused.json()["error"]["message"]
    assert asked("sql", "sql").status_code == 200
    assert asked(world.base, "").status_code == 200


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_broken_adapter_is_refused_with_reason(world: World, case: Broken) -> None:
    answer = complete(world.client, case.name, PROMPT, 1)
    assert answer.status == case.status, answer.error
    for text in (f"adapter '{case.name}'", "expected", *case.texts):
        assert text in answer.error


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("rank-128", ("L003", "rank 128", "at most 64", "--max-lora-rank 128")),
        ("other-base", ("L003", "someone/other-7b", "128 inputs", "256 inputs")),
        ("link-out", ("L005", "symlink", "LORA_PLUGINS_LINK_ROOTS")),
        ("link-file-out", ("L005", "symlink", "adapter_model.safetensors")),
    ],
)
def test_unfit_adapter_is_refused_with_reason(world: World, name: str, texts: tuple[str, ...]) -> None:
    answer = complete(world.client, name, PROMPT, 1)
    assert answer.status == 400, answer.error
    for text in (f"adapter '{name}'", *texts):
        assert text in answer.error


def test_rejection_is_logged_once_and_not_listed(world: World) -> None:
    for _ in range(3):
        assert complete(world.client, "qalora", PROMPT, 1).status == 400
    lines = [line for line in world.server.log().splitlines() if "WARNING" in line and "adapter 'qalora'" in line]
    assert len(lines) == 1
    assert "[L003]" in lines[0]
    served = {card.id for card in world.client.models.list() if card.root != card.id}
    assert "static" in served
    assert "qalora" not in served, "only among what the sources list, whose root is their name"


def test_repaired_adapter_is_served(world: World) -> None:
    path = world.root / "json-array" / "adapter_config.json"
    assert complete(world.client, "json-array", PROMPT, 1).status == 400
    path.write_bytes((world.root / "sql" / "adapter_config.json").read_bytes())
    answer = complete(world.client, "json-array", PROMPT, MAX_TOKENS)
    assert list(answer.token_ids) == world.bed.answers["sql"]


def test_server_is_alive_and_right_after_all_of_it(world: World) -> None:
    for name in ("sql", "chat", "wide", "stable", "team/poet"):
        assert list(complete(world.client, name, PROMPT, MAX_TOKENS).token_ids) == world.bed.answers[name]
    assert list(complete(world.client, world.base, PROMPT, MAX_TOKENS).token_ids) == world.bed.answers[None]
    assert world.server.process.poll() is None
    assert "500 Internal Server Error" not in world.server.log()
    assert "Traceback" not in world.server.log()
