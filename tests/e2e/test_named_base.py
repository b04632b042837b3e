"""A real server says in each answer, in its log and its list that an adapter was trained on another base model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from lora_plugins.lifecycle.response import HEADER, WARNING_HEADER
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import PROMPT, edit_config
from tests.cli.common import outside
from tests.e2e.admin import KEY, Admin
from tests.e2e.digests import CHAT
from tests.e2e.servers import admin_server

SERVED, OTHER = "the-base", "mistralai/Mistral-7B-v0.1"
SAID = f"trained on {OTHER}, served on {SERVED}: another model type (mistral, not llama)"


@pytest.fixture(scope="module")
def admin(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    home = tmp_path_factory.mktemp("named-base")
    root = home / "adapters"
    for name, base in {
        "mistral": OTHER,
        "llama": "unsloth/llama-3-8b-bnb-4bit",
        "step": "/out/step-9",
    }.items():
        shutil.copytree(bed.adapters / "sql", root / name)
        edit_config(root / name, base_model_name_or_path=base)
    with admin_server(bed, home, "--max-loras", "2", "--served-model-name", SERVED) as server:
        yield Admin(server, connect(server), bed, root, home / "allowed")


def test_another_type_is_served_with_a_warning(admin: Admin) -> None:
    for stream in (False, True):
        body = {"model": "mistral", "prompt": PROMPT, "max_tokens": 2, "stream": stream}
        answer = admin.call("POST", "/v1/completions", body)
        assert (answer.status_code, answer.headers[WARNING_HEADER]) == (200, SAID)
        assert answer.headers[HEADER] == admin.view("mistral")["digest"]
    chat = admin.call("POST", "/v1/chat/completions", {"model": "mistral", "messages": CHAT, "max_tokens": 2})
    assert chat.headers[WARNING_HEADER] == SAID
    assert list(complete(admin.client, "mistral", PROMPT, MAX_TOKENS).token_ids) == admin.bed.answers["sql"]
    assert admin.view("mistral")["warnings"] == [SAID]
    assert SAID in outside("why", "mistral", "--url", admin.server.url, env={"VLLM_API_KEY": KEY}).out
    lines = [line for line in admin.server.log().splitlines() if SAID in line]
    assert len(lines) == 1
    assert "WARNING" in lines[0]


def test_compare_finds_it_served_as_trained_all_the_same(admin: Admin) -> None:
    asked = ("compare", "mistral", "--url", admin.server.url, "--base", str(admin.bed.base))
    right = outside(*asked, "--peft", admin.bed.adapters / "sql", env={"VLLM_API_KEY": KEY})
    assert (right.code, right.out.splitlines()[-1]) == (0, "mistral: served as trained"), right.out + right.err
    wrong = outside(*asked, "--peft", admin.bed.adapters / "chat", env={"VLLM_API_KEY": KEY})
    assert (wrong.code, wrong.out.splitlines()[-1]) == (1, "mistral: not shown to be served as trained")


@pytest.mark.parametrize("name", ["llama", "step", SERVED])
def test_the_same_or_an_unknown_name_has_no_warning(admin: Admin, name: str) -> None:
    answer = admin.call("POST", "/v1/completions", {"model": name, "prompt": PROMPT, "max_tokens": 2})
    assert (answer.status_code, WARNING_HEADER in answer.headers) == (200, False)
    if name != SERVED:
        assert admin.view(name)["warnings"] == []
