"""A server that keeps to the base model's chats (`LORA_PLUGINS_ADAPTER_CHAT=strict`) refuses adapters with others.

The same server ignores the fields in which other servers take an adapter (`LORA_PLUGINS_ADAPTER_FIELDS=ignore`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx

from testbed.bed import Bed
from testbed.client import PLAIN_HTTP
from testbed.reference import Reference
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, lora_server
from tests.e2e.test_chat import ADAPTERS, MESSAGES, write_chat

TOKENS = 8
FIELDS = ("lora_adapter", "adapter_id", "lora_path", "lora_name")
# Name → what the refusal names.
REFUSED = {"file": "chat template 'default'", "ends-by-id": "end tokens [", "adds": "added tokens"}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/completions", {"prompt": "The quick brown fox"}),
)


def test_strict_serves_the_base_models_chats_alone(bed: Bed, tmp_path: Path) -> None:
    reference, root = Reference(bed.base), tmp_path / "adapters"
    for name in ("plain", "same", *REFUSED):
        shutil.copytree(bed.adapters / "sql", root / name)
    write_chat(root / "same", reference, template=reference.tokenizer.chat_template)
    for name in REFUSED:
        write_chat(root / name, reference, **ADAPTERS[name])
    text = reference.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompt = [int(token) for token in reference.tokenizer(text, add_special_tokens=False)["input_ids"]]
    plugins = (RESOLVER, MANAGER, KERNELS)
    settings = {"LORA_PLUGINS_ADAPTER_CHAT": "strict", "LORA_PLUGINS_ADAPTER_FIELDS": "ignore"}
    with (
        lora_server(bed, tmp_path, plugins=plugins, **settings) as server,
        httpx.Client(base_url=server.url, verify=PLAIN_HTTP, timeout=240) as client,
    ):
        for field in FIELDS:
            body = {
                "model": str(bed.base),
                "messages": MESSAGES,
                "max_tokens": TOKENS,
                "temperature": 0,
                field: "plain",
            }
            said = client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
            assert said.status_code == 200, (field, said.text)
            assert said.json()["choices"][0]["token_ids"] == reference.generate(None, prompt, TOKENS), field
        for name, named in REFUSED.items():
            for path, body in ASKED:
                answer = client.post(path, json={"model": name, "max_tokens": TOKENS, **body})
                assert answer.status_code == 400, (name, path, answer.text)
                for part in ("[L003]", name, named, "LORA_PLUGINS_ADAPTER_CHAT=strict"):
                    assert part in answer.json()["error"]["message"], (name, path)
        for name in ("plain", "same"):
            body = {"model": name, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
            said = client.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
            assert said["prompt_token_ids"] == prompt
            assert said["choices"][0]["token_ids"] == reference.generate(root / name, prompt, TOKENS)
