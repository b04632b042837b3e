"""Adapters named as a type of content parts answer for no other name, unless `--default-mm-loras` declares them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_plugins.lifecycle.response import HEADER
from testbed.bed import MAX_TOKENS, Bed
from testbed.models import PROMPT
from testbed.multimodal import build
from testbed.server import Server
from tests.e2e.admin import HEADERS, KEY
from tests.e2e.conftest import World
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, admin_server, lora_server
from tests.e2e.test_towers import ONE_IMAGE, Asked

POLICY = f"""
[default]
adapters = ["*"]
[tenants.operators]
keys = ["{KEY}"]
admin = true
"""
USER = {"role": "user", "content": [{"type": "text", "text": PROMPT}]}
# Every route that takes messages; the Responses API has parts of the type `input_text`.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": MAX_TOKENS},
    "/v1/chat/completions/batch": {"messages": [[USER]], "max_tokens": MAX_TOKENS},
    "/v1/messages": {"messages": [USER], "max_tokens": MAX_TOKENS},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}],
        "max_output_tokens": MAX_TOKENS,
    },
}


@pytest.fixture(scope="module")
def with_policy(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path, str]]:
    home = tmp_path_factory.mktemp("with-policy")
    shutil.copytree(bed.adapters, home / "adapters")
    (home / "policy.toml").write_text(POLICY)
    with admin_server(bed, home, LORA_PLUGINS_POLICY=str(home / "policy.toml")) as server:
        yield server, home / "adapters", str(bed.base)


@pytest.fixture(params=["with a policy", "without"])
def plain(request: pytest.FixtureRequest) -> tuple[Server, Path, str]:
    if request.param == "without":
        world: World = request.getfixturevalue("world")
        return world.server, world.root, world.base
    served: tuple[Server, Path, str] = request.getfixturevalue("with_policy")
    return served


def test_a_text_adapter_answers_no_chat_of_the_base_model(plain: tuple[Server, Path, str]) -> None:
    server, root, base = plain

    def asked(path: str, model: str) -> tuple[str, bool, Any]:
        body = {"model": model, "temperature": 0, **ROUTES[path]}
        said = httpx.post(f"{server.url}{path}", json=body, headers=HEADERS, timeout=120)
        assert said.status_code == 200, said.text
        answer = said.json()
        parts = answer.get("choices") or answer.get("output") or answer["content"]
        return answer["model"], HEADER in said.headers, [part.get("message", part) for part in parts]

    def without_ids(answer: tuple[str, bool, Any]) -> Any:
        return *answer[:2], [{**part, "id": None} for part in answer[2]]

    before = {path: without_ids(asked(path, base)) for path in ROUTES}
    shutil.copytree(root / "sql", root / "text")
    loaded = without_ids(asked("/v1/chat/completions", "text"))
    assert loaded[:2] == ("text", True)
    assert loaded[2] != before["/v1/chat/completions"][2]
    assert {path: without_ids(asked(path, base)) for path in ROUTES} == before
    shutil.rmtree(root / "text")  # other files' tests use the server too


@pytest.mark.nightly
def test_a_declared_adapter_answers_its_modality_alone(bed: Bed, tmp_path: Path) -> None:
    """As in vLLM: requests for the base model with an image; text is no modality that the operator declared."""
    model = build(tmp_path / "model")
    for name, original in (("text", "text"), ("image", "tower")):
        shutil.copytree(model.adapters / original, tmp_path / "adapters" / name)
    declared = {"lora_name": "image", "lora_path": str(model.adapters / "all")}
    flags = (
        "--enable-tower-connector-lora",
        *ONE_IMAGE,
        "--default-mm-loras",
        json.dumps({"image": declared["lora_path"]}),
    )
    plugins, one = (RESOLVER, MANAGER, KERNELS, ADMIN), dataclasses.replace(bed, base=model.base)
    with lora_server(one, tmp_path, *flags, plugins=plugins, LORA_PLUGINS_REFRESH_S="0") as server:
        asked = Asked(server, model, tmp_path / "adapters")

        def change(verb: str, **body: str) -> None:
            said = httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=body, headers=HEADERS, timeout=120)
            assert said.status_code == 200, said.text

        for name, like in (("", "all"), ("text", "text"), ("", "all"), ("image", "all")):
            assert asked.answer(name) == model.answers[like], name
        change("unload", lora_name="image")
        assert asked.ask("image").status_code == 404, "a source's adapter would answer for everybody"
        assert asked.answer("") == model.answers[""]
        change("load", **declared)
        assert asked.answer("") == model.answers["all"]
