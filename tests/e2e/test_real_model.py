"""A model that writes sentences, with the adapters of `examples/adapters`: each answer is PEFT's."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from examples.training.__main__ import ADAPTERS
from testbed.client import way_to
from testbed.real_model import NoRealModel, real_model
from testbed.reference import Reference
from testbed.server import Server, vllm_server
from tests.e2e.servers import ENVIRONMENT
from tests.repetitions import times

MAX_TOKENS = times(64, short=16)
QUESTIONS = (
    "What is the sea?", "What is a tree?", "Is snow cold?", "How many sales were there in June?",
    "How do I bake bread?", "What is a river?", "Tell me about dogs.", "Is a lion a plant?",
    "What is the average year of the books?", "Why do birds sing?", "What is gold?", "How do I learn to swim?",
    "Which books are from 2005?", "What is winter?", "Do horses have wings?", "What is a friend?",
    "Tell me about bees.", "What is the cheapest book by Homer?", "What is rain?", "How do I write a letter?",
)[: times(20, short=2)]  # fmt: skip
NAMES = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())


@dataclass(frozen=True)
class Real:
    """A server of the real model, and what PEFT says of its answers."""

    server: Server
    base: Path
    reference: Reference


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    try:
        base = real_model()
    except NoRealModel as error:
        pytest.skip(str(error))
    home = tmp_path_factory.mktemp("real-model")
    shutil.copytree(ADAPTERS, home / "adapters")
    env = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": "lora_filesystem_resolver,lora_lru_manager,lora_kernels",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(home / "adapters"),
        "LORA_PLUGINS_STORE_DIR": str(home / "store"),
        **ENVIRONMENT,
    }
    slots = ("--enable-lora", "--max-lora-rank", "32", "--max-loras", "4", "--max-cpu-loras", "8")
    with vllm_server(base, home / "server.log", arguments=slots, env=env, is_forking=True) as server:
        yield Real(server, base, Reference(base))


def test_trained_adapters_answer_as_peft_does_in_a_mixed_batch(real: Real) -> None:
    asked = [(name, question) for question in QUESTIONS for name in (None, *NAMES)]
    answers = asyncio.run(ask_all(real, asked))
    wrong = {}
    for (name, question), ids in zip(asked, answers, strict=True):
        prompt = real.reference.chat_ids([{"role": "user", "content": question}])
        if missed := real.reference.misses(ADAPTERS / name if name else None, prompt, ids):
            wrong[name, question] = missed, real.reference.tokenizer.decode(ids)
    assert not wrong


async def ask_all(real: Real, asked: list[tuple[str | None, str]]) -> list[list[int]]:
    """The token ids of a greedy chat with each adapter, sixteen at a time."""
    places = asyncio.Semaphore(16)
    async with openai.AsyncOpenAI(**way_to(real.server)) as client:

        async def ask(name: str | None, question: str) -> list[int]:
            async with places:
                answer = await client.chat.completions.create(
                    model=name or str(real.base),
                    messages=[{"role": "user", "content": question}],
                    max_tokens=MAX_TOKENS,
                    temperature=0,
                    extra_body={"return_token_ids": True},
                )
            return list(answer.choices[0].token_ids)

        return await asyncio.gather(*(ask(name, question) for name, question in asked))
