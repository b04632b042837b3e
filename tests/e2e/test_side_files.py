"""Files beside the weights that stock never reads refuse no adapter, on a real server whose operator gave a template.

The base model is as speech models are: 28,940 added tokens (in short runs 4,000), and the same tokenizer is
saved beside the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from testbed.bed import Bed
from testbed.client import PLAIN_HTTP
from testbed.models import DEMO_ADAPTERS, build_adapter, build_base
from testbed.reference import Reference
from testbed.server import Server
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server
from tests.repetitions import times

SPOKEN = times(28_940, short=4_000)
MESSAGES = [{"role": "user", "content": "quick <speech_7>"}]
OF_OPERATOR = "{% for m in messages %}operator:{{ m.content }}{% endfor %}"
OF_TOOLS = "{% for t in tools %}tool:{{ t.function.name }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "jump", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = build_base(tmp_path_factory.mktemp("speech") / "base", hidden=64, layers=1, vocab=SPOKEN + 512)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([f"<speech_{number}>" for number in range(SPOKEN)])
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Server]:
    home = base.parent
    own = build_adapter(base, home / "adapters", DEMO_ADAPTERS[0])
    AutoTokenizer.from_pretrained(base).save_pretrained(own)
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": -1}))
    other = build_adapter(base, home / "adapters", DEMO_ADAPTERS[1])
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": OF_TOOLS}
    begins = {"single": "<s> $A", "pair": "<s> $A $B:1", "special_tokens": [("<s>", 0)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**begins)
    tokenizer.save_pretrained(other)
    (home / "operator.jinja").write_text(OF_OPERATOR)
    bed = Bed(base, home / "adapters", {})
    arguments = ("--chat-template", str(home / "operator.jinja"), "--max-model-len", "200")
    with lora_server(bed, home, *arguments, plugins=(RESOLVER, MANAGER, KERNELS, ADMIN)) as started:
        yield started


def posted(server: Server, path: str, **body: Any) -> httpx.Response:
    limits = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    answer = httpx.post(f"{server.url}{path}", json={**limits, **body}, verify=PLAIN_HTTP, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_template_for_tools_and_a_beginning_are_the_adapters(server: Server, base: Path) -> None:
    """The judge is `AutoTokenizer` with the files beside the adapter."""
    name = DEMO_ADAPTERS[1].name
    own = AutoTokenizer.from_pretrained(base.parent / "adapters" / name)
    whole = posted(server, "/v1/completions", model=name, prompt="quick")
    assert (
        whole.json()["choices"][0]["prompt_token_ids"]
        == own("quick")["input_ids"]
        != Reference(base).prompt_ids("quick")
    )
    cut = posted(server, "/tokenize", model=name, prompt="quick")
    assert cut.json()["tokens"] == own("quick")["input_ids"]
    asked = {"model": name, "messages": MESSAGES, "tool_choice": "none"}
    chats = [posted(server, "/v1/chat/completions", **asked, **more).json() for more in ({}, {"tools": TOOLS})]
    texts = "operator:quick <speech_7>", own.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    for chat, text in zip(chats, texts, strict=True):
        assert chat["prompt_token_ids"] == own(text, add_special_tokens=False)["input_ids"]


def test_a_speech_models_files_with_an_odd_value_are_served(server: Server, base: Path) -> None:
    reference, name = Reference(base), DEMO_ADAPTERS[0].name
    chat = posted(server, "/v1/chat/completions", model=name, messages=MESSAGES)
    whole = posted(server, "/v1/completions", model=name, prompt="quick <speech_7>", ignore_eos=True)
    prompt = reference.tokenizer("operator:quick <speech_7>", add_special_tokens=False)["input_ids"]
    assert chat.json()["prompt_token_ids"] == prompt, "the operator's template, and one token of speech"
    prompt = reference.prompt_ids("quick <speech_7>")
    assert whole.json()["choices"][0]["prompt_token_ids"] == prompt
    adapter = base.parent / "adapters" / name
    assert whole.json()["choices"][0]["token_ids"] == reference.generate(adapter, prompt, 8)
    said = "not used of the adapter's files for chats: eos_token_id of generation_config.json (-1; expected"
    assert said in chat.headers["x-lora-warning"]
    assert said in whole.headers["x-lora-warning"]
    assert server.log().count(said) == 1
