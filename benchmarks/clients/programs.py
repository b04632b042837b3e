"""What pages of libraries say to type, for `make test-clients`: a function for each library.

`programs.py FUNCTION URL ADAPTER…`, run by the Python of the library's own environment; so imports are in functions.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

USERS = "How many users?"
MESSAGES = [{"role": "user", "content": USERS}]
PROXY_KEY = "sk-of-this-test-4f1c92ab7e55d08812cd"
PROXY_CONFIG = """
model_list:
  - model_name: lora/*
    litellm_params: {{model: openai/*, api_base: "{url}/v1", api_key: none}}
  - model_name: lora/{first}
    litellm_params: {{model: openai/{first}, api_base: "{url}/v1", api_key: none}}
    model_info: {{input_cost_per_token: 0.001, output_cost_per_token: 0.01}}
"""


def openai_sdk(url: str, *names: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    for name in names:
        print(client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=8).choices[0].message.content)
        print(client.completions.create(model=name, prompt="The quick", max_tokens=8).choices[0].text)
        print(client.responses.create(model=name, input=USERS, max_output_tokens=8).output_text)


def anthropic_sdk(url: str, *names: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none")
    for name in names:
        print(client.messages.create(model=name, messages=MESSAGES, max_tokens=8).content[0].text)
        with client.messages.stream(model=name, messages=MESSAGES, max_tokens=8) as stream:
            print(stream.get_final_text())


def litellm_sdk(url: str, *names: str) -> None:
    import litellm

    for name in names:
        for model in (f"openai/{name}", f"hosted_vllm/{name}"):
            answer = litellm.completion(model, MESSAGES, api_base=f"{url}/v1", api_key="none", max_tokens=8)
            print(answer.choices[0].message.content)


def litellm_proxy(url: str, *names: str) -> None:
    """The proxy as docs/guides/clients.md has it, with a price for an adapter beside the pattern."""
    import httpx

    Path("litellm.yaml").write_text(PROXY_CONFIG.format(url=url, first=names[0]))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [str(Path(sys.executable).with_name("litellm")), "--config", "litellm.yaml", "--host", "127.0.0.1"]
    env = os.environ | {"LITELLM_MASTER_KEY": PROXY_KEY}
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
    client.headers["Authorization"] = f"Bearer {PROXY_KEY}"
    costs = {}
    with subprocess.Popen([*command, "--port", str(port)], env=env, start_new_session=True) as process:
        try:
            for _ in range(240):
                try:
                    if client.get("/health/liveliness").is_success:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.5)
            for name in names:
                limits = {"chat/completions": "max_tokens", "responses": "max_output_tokens"}
                for route, limit in limits.items():
                    asked = {"messages": MESSAGES} if route == "chat/completions" else {"input": USERS}
                    body = {"model": f"lora/{name}", limit: 8, **asked}
                    answer = client.post(f"/v1/{route}", json=body).raise_for_status()
                    key = name if route == "chat/completions" else f"{name}, /v1/{route}"
                    costs[key] = float(answer.headers.get("x-litellm-response-cost") or 0)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
    print("said:", json.dumps({"costs": costs}))


def dspy_lm(url: str, *names: str) -> None:
    import dspy

    for name in names:
        print(dspy.LM(f"openai/{name}", api_base=f"{url}/v1", api_key="none", max_tokens=8, cache=False)(USERS))


def openai_agents(url: str, *names: str) -> None:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    async def ask() -> None:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        for name in names:
            # An untrained model never ends, and `OpenAIResponsesModel` takes an answer at its limit for an error.
            model = OpenAIChatCompletionsModel(model=name, openai_client=client)
            agent = Agent("counter", "Be brief.", model=model, model_settings=ModelSettings(max_tokens=8))
            print((await Runner.run(agent, USERS)).final_output)

    set_tracing_disabled(disabled=True)
    asyncio.run(ask())


def pydantic_agent(url: str, *names: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    for name in names:
        model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
        print(Agent(model, instructions="Be brief.").run_sync(USERS, model_settings={"max_tokens": 64}).output)


def smolagents_model(url: str, *names: str) -> None:
    from smolagents import ChatMessage, OpenAIModel

    for name in names:
        model = OpenAIModel(model_id=name, api_base=f"{url}/v1", api_key="none", max_tokens=8)
        print(model([ChatMessage(role="user", content=[{"type": "text", "text": USERS}])]).content)


def langchain_openai_chat(url: str, *names: str) -> None:
    from langchain_openai import ChatOpenAI

    for name in names:
        print(ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_tokens=8).invoke(USERS).content)


def llama_index_llm(url: str, *names: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    for name in names:
        # Its own temperature is 0.1; PEFT's answer is the likeliest.
        more = {"is_chat_model": True, "max_tokens": 8, "temperature": 0}
        model = OpenAILike(model=name, api_base=f"{url}/v1", api_key="none", **more)
        print(model.chat([ChatMessage(role="user", content=USERS)]).message.content)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
