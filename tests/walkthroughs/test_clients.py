"""The page on LiteLLM and Open WebUI: its server, a real LiteLLM where one is installed, and Open WebUI's requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testbed.bed import Bed
from testbed.chat_front_ends import KEY, LITELLM, litellm
from testbed.pages import Block
from tests.walkthroughs.reader import Do, Reader, Step, Walk, left_out
from tests.walkthroughs.small_server import PORT, folder_of_adapters, reads, small

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(None in map(shutil.which, ("curl", "jq")), reason="the page uses them"),
]

NAMES = "curl -s localhost:8000/v1/models -H 'Authorization: Bearer SECRET' | jq -r '.data[].id'    # base, team/sql, …"
BY_LITELLM = (
    "needs LiteLLM; tests/walkthroughs/test_clients.py::test_litellm_lists_and_passes_on_as_the_page_says has it"
)
LIST = """$ curl -s localhost:4000/v1/models -H "Authorization: Bearer $LITELLM_MASTER_KEY" | jq -r '.data[].id'"""
CLIENTS = Walk(
    "docs/guides/clients.md",
    [
        Step("export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_PLUGINS=lora_plugins", Do.SERVE),
        Step(NAMES),
        Step("# litellm.yaml", Do.WRITE, "litellm.yaml"),
        left_out("pip install 'litellm[proxy]'", BY_LITELLM, "98cd6a50"),
        left_out(LIST, BY_LITELLM, "9011f20b"),
    ],
    {
        **small("BASE"),
        **folder_of_adapters("/adapters"),
        "localhost:8000": PORT,
        "127.0.0.1:8000": PORT,
    },
)
CHAT = {"messages": [{"role": "user", "content": "How many users?"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture
def page(tmp_path: Path, bed: Bed, env: dict[str, str]) -> Iterator[Reader]:
    """The page's server; beside its adapter comes a broken one, which the lists of the page do not have yet."""
    shutil.copytree(bed.adapters / "sql", tmp_path / "adapters" / "team" / "sql")
    with reads(CLIENTS, tmp_path, bed.base, env) as reader:
        shutil.copytree(bed.adapters / "sql", tmp_path / "adapters" / "broken")
        weights = tmp_path / "adapters" / "broken" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        yield reader


def test_open_webuis_requests_are_answered(page: Reader) -> None:
    """As `routers/openai.py` and `main.py` of Open WebUI 0.12.4 send them, for a user of a picker."""
    headers = {"Authorization": "Bearer SECRET", "Content-Type": "application/json"}
    headers |= {"X-OpenWebUI-User-Name": "Ann%20B", "X-OpenWebUI-User-Id": "7f1e", "X-OpenWebUI-User-Role": "user"}
    headers |= {"X-OpenWebUI-User-Email": "ann@example.com", "X-OpenWebUI-Chat-Id": "c0ffee"}
    with httpx.Client(base_url=f"{page.url}/v1", headers=headers, timeout=240) as client:
        offered = [model["id"] for model in client.get("/models").json()["data"]]
        assert page.printed[NAMES].split() == offered == ["base", "team/sql"]
        body = CHAT | {"model": "team/sql", "stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/chat/completions", json=body) as answer:
            assert (answer.status_code, len(answer.headers["x-lora-digest"])) == (200, 64)
            said = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert said[-1] == "[DONE]"
        assert json.loads(said[-2])["usage"]["completion_tokens"] == CHAT["max_tokens"]
        tool = {"type": "function", "function": {"name": "ask_user", "parameters": {"type": "object"}}}
        with_tools = client.post("/chat/completions", json=body | {"tools": [tool]})  # not with `legacy`
        reason = with_tools.json()["error"]["message"]
        assert (with_tools.status_code, f"`{reason}`" in Path(CLIENTS.page).read_text()) == (400, True)
        assert client.post("/chat/completions", json=body | {"model": "nobody"}).status_code == 404
        assert "[L005]" in client.post("/chat/completions", json=body | {"model": "broken"}).json()["error"]["message"]


def ask(client: httpx.Client, model: str) -> httpx.Response:
    return client.post("/v1/chat/completions", json=CHAT | {"model": model})


def listed(client: httpx.Client) -> list[str]:
    return sorted(model["id"] for model in client.get("/v1/models").json()["data"])


def entry(config: str, name: str, model: str) -> str:
    """The page's configuration with another pattern for clients and for the server."""
    return config.replace("model_name: lora/*", f'model_name: "{name}"').replace("model: openai/*", f"model: {model}")


BY_PATTERN = (  # the page's table: what is listed, what answers, what is unknown
    ("openai/*", "openai/*", ["openai/base", "openai/team/sql"], "openai/team/sql", "team/sql"),
    ("team/*", "openai/team/*", ["team/base", "team/sql"], "team/sql", "team/base"),
    ("*", "openai/*", ["openai/base", "openai/team/sql"], "team/sql", "openai/team/sql"),
    ("*", "hosted_vllm/*", [], "team/sql", "hosted_vllm/team/sql"),
    ("lora/*", "hosted_vllm/*", [], "lora/team/sql", "team/sql"),
    ("team/sql", "hosted_vllm/team/sql", ["team/sql"], "team/sql", "base"),
    ("team/sql", "openai/team/sql", ["team/sql"], "team/sql", "base"),
)


@pytest.mark.skipif(LITELLM is None, reason="pip install 'litellm[proxy]' in an environment of its own, on PATH")
def test_litellm_lists_and_passes_on_as_the_page_says(page: Reader, tmp_path: Path) -> None:
    config = (tmp_path / "litellm.yaml").read_text()
    with litellm(tmp_path, config) as client:
        (shown,) = [block for block in CLIENTS.blocks() if block.first == LIST]
        own = {"localhost:4000": client.base_url.netloc.decode(), "$LITELLM_MASTER_KEY": KEY}
        commands = shown.commands()
        for written, read in own.items():
            commands = commands.replace(written, read)
        assert page.run(Block("", commands, shown.line)) == shown.shown()
        body = CHAT | {"model": "lora/team/sql", "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert (answer.status_code, len(answer.headers["llm_provider-x-lora-digest"])) == (200, 64)
            assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
        unknown, broken = ask(client, "lora/nobody"), ask(client, "lora/broken")
        assert (unknown.status_code, "The model `nobody` does not exist" in unknown.text) == (404, True)
        assert (broken.status_code, "[L005]" in broken.text) == (400, True)
    for name, model, listed, answers, fails in BY_PATTERN:
        with litellm(tmp_path, entry(config, name, model)) as client:
            assert [each["id"] for each in client.get("/v1/models").json()["data"]] == listed, name
            assert ask(client, answers).status_code == 200, name
            assert ask(client, fails).status_code in (400, 404), name
