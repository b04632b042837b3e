"""LiteLLM's proxy as docs/guides/clients.md has it, with a price for each adapter beside the pattern."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

KEY = "sk-of-this-test-4f1c92ab7e55d08812cd"
CONFIG = """
model_list:
  - model_name: lora/*
    litellm_params: {{model: openai/*, api_base: "{url}/v1", api_key: none}}
  - model_name: lora/{first}
    litellm_params: {{model: openai/{first}, api_base: "{url}/v1", api_key: none}}
    model_info: {{input_cost_per_token: 0.001, output_cost_per_token: 0.01}}
"""


def main(url: str, first: str, second: str) -> None:
    Path("litellm.yaml").write_text(CONFIG.format(url=url, first=first))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [str(Path(sys.executable).with_name("litellm")), "--config", "litellm.yaml", "--host", "127.0.0.1"]
    env = os.environ | {"LITELLM_MASTER_KEY": KEY}
    with subprocess.Popen([*command, "--port", str(port)], env=env, start_new_session=True) as process:
        try:
            ask(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120), first, second)
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def ask(client: httpx.Client, *names: str) -> None:
    client.headers["Authorization"] = f"Bearer {KEY}"
    for _ in range(240):
        try:
            if client.get("/health/liveliness").is_success:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    costs = {}
    for name in names:
        body = {"model": f"lora/{name}", "messages": [{"role": "user", "content": "How many users?"}], "max_tokens": 8}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status()
        costs[name] = float(answer.headers.get("x-litellm-response-cost") or 0)
        body = {"model": f"lora/{name}", "input": "How many users?", "max_output_tokens": 8}
        answer = client.post("/v1/responses", json=body).raise_for_status()
        costs[f"{name}, /v1/responses"] = float(answer.headers.get("x-litellm-response-cost") or 0)
    print("said:", json.dumps({"costs": costs}))


main(*sys.argv[1:])
