"""A model that writes sentences, with the adapters of `examples/adapters`: each answer is PEFT's."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from examples.training.__main__ import ADAPTERS
from testbed.chat_front_ends import KEY, LITELLM, OPEN_WEBUI, litellm, open_webui
from testbed.client import way_to
from testbed.mixtures import mixed_by_peft
from testbed.real_model import NoRealModel, real_model
from testbed.reference import Reference
from testbed.server import Server, vllm_server
from tests.e2e.servers import BLOCKS, ENVIRONMENT
from tests.repetitions import times

MAX_TOKENS = times(64, short=12)
QUESTIONS = (
    "What is the sea?", "What is a tree?", "Is snow cold?", "How many sales were there in June?",
    "How do I bake bread?", "What is a river?", "Tell me about dogs.", "Is a lion a plant?",
    "What is the average year of the books?", "Why do birds sing?", "What is gold?", "How do I learn to swim?",
    "Which books are from 2005?", "What is winter?", "Do horses have wings?", "What is a friend?",
    "Tell me about bees.", "What is the cheapest book by Homer?", "What is rain?", "How do I write a letter?",
)[: times(20, short=1)]  # fmt: skip
NAMES = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
CHAT = "innkeeper"  # has a chat template and an end token of its own
QUESTION, LONGEST = "What is a river?", 48


@dataclass(frozen=True)
class Told:
    """An answer as a client has it."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


class ReadOnce(Reference):
    """Keeps the base model, half a gigabyte, and puts the adapter that was asked for last on it."""

    _model: Any = None
    _adapter: Path | None = None

    def load(self, adapter: Path | None) -> Any:
        from peft import PeftModel

        if self._model is None:
            self._model = super().load(None)
        if self._adapter != adapter:
            if self._adapter is not None:
                self._model = self._model.unload()
            if adapter is not None:
                self._model = PeftModel.from_pretrained(self._model, str(adapter))
            self._adapter = adapter
        return self._model.eval()


@dataclass(frozen=True)
class Real:
    """A server of the real model, and what PEFT says of its answers."""

    server: Server
    base: Path
    reference: Reference

    def prompt(self, name: str | None, question: str) -> list[int]:
        """As PEFT is given it: with the tokenizer of the adapter, where it has its own."""
        own = self.tokenizer(name)
        chat = [{"role": "user", "content": question}]
        text = own.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return [int(token) for token in own(text, add_special_tokens=False)["input_ids"]]

    def told(self, prompt: list[int], ids: tuple[int, ...]) -> Told:
        """What these ids say to a client, where they are PEFT's of the adapter with its own chat, up to an end token.

        PEFT computes all of them at once: to generate them takes it ten times as long.
        """
        own = self.tokenizer(CHAT)
        is_end = [token in (own.eos_token_id, self.reference.tokenizer.eos_token_id) for token in ids]
        assert self.reference.misses(ADAPTERS / CHAT, prompt, ids) == []
        assert not any(is_end[:-1])
        assert is_end[-1] or len(ids) == LONGEST
        text = own.decode(list(ids), skip_special_tokens=True)
        return Told(ids, text, "stop" if is_end[-1] else "length", len(prompt), len(ids))

    def tokenizer(self, name: str | None) -> Any:
        """The base model's vocabulary with the adapter's template and special tokens, as a trainer saves both."""
        if name is None or not (ADAPTERS / name / "tokenizer_config.json").exists():
            return self.reference.tokenizer
        return tokenizer_of(self.base, name)


@cache
def tokenizer_of(base: Path, name: str) -> Any:
    """Of an adapter that has its own."""
    with tempfile.TemporaryDirectory() as whole:
        shutil.copytree(ADAPTERS / name, whole, dirs_exist_ok=True)
        shutil.copy(base / "tokenizer.json", whole)
        return AutoTokenizer.from_pretrained(whole)


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
        "LORA_PLUGINS_LIST": "all",
        "LORA_PLUGINS_STORE_DIR": str(home / "store"),
        **ENVIRONMENT,
    }
    slots = ("--enable-lora", "--max-lora-rank", "32", "--max-loras", "4", "--max-cpu-loras", "8", *BLOCKS)
    arguments = (*slots, "--trust-request-chat-template")
    with vllm_server(base, home / "server.log", arguments=arguments, env=env, is_forking=True) as server:
        yield Real(server, base, ReadOnce(base))


def test_trained_adapters_answer_as_peft_does_in_a_mixed_batch(real: Real) -> None:
    asked = [(name, question) for name in (None, *NAMES) for question in QUESTIONS]
    answers = asyncio.run(ask_all(real, asked))
    wrong = {}
    for (name, question), ids in zip(asked, answers, strict=True):
        prompt = real.prompt(name, question)
        if missed := real.reference.misses(ADAPTERS / name if name else None, prompt, ids):
            wrong[name, question] = missed, real.reference.tokenizer.decode(ids)
    assert not wrong


@pytest.mark.nightly  # tests/e2e/test_mixtures.py has the same on the bed's model
def test_a_mixture_of_trained_adapters_answers_as_peft_does(real: Real, tmp_path: Path) -> None:
    parts = {ADAPTERS / "pirate": 0.7, ADAPTERS / "json": 0.5, ADAPTERS / "haiku": -0.3}
    name = "+".join(f"{part.name}*{weight}" for part, weight in parts.items())
    asked = [(one, question) for one in (name, "pirate", None) for question in QUESTIONS]
    answers = asyncio.run(ask_all(real, asked))
    peft = mixed_by_peft(Reference(real.base), parts, tmp_path)
    for (one, question), ids in zip(asked, answers, strict=True):
        if one == name:
            assert real.reference.misses(peft, real.prompt(None, question), ids) == []
            assert ids not in [its for (other, _), its in zip(asked, answers, strict=True) if other != name]


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


def test_an_adapters_own_chat_answers_openais_client(real: Real) -> None:
    with openai.OpenAI(**way_to(real.server)) as client:
        assert_as_peft(real, client, CHAT)


def test_the_base_models_template_gives_another_answer(real: Real) -> None:
    """Sent by the client, whose template comes before the adapter's."""
    ours, base = real.prompt(CHAT, QUESTION), real.prompt(None, QUESTION)
    others = {"chat_template": real.reference.tokenizer.chat_template}
    with openai.OpenAI(**way_to(real.server)) as client:
        told = tell(client, CHAT, QUESTION, is_streamed=False, **others)
    assert told == real.told(base, told.ids)
    assert real.reference.misses(ADAPTERS / CHAT, ours, told.ids), "PEFT has it, not with the adapter's template"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.skipif(LITELLM is None, reason="pip install 'litellm[proxy]' in an environment of its own, on PATH")
def test_an_adapters_own_chat_answers_through_litellm(real: Real, tmp_path: Path) -> None:
    served = {"model": "openai/*", "api_base": f"{real.server.url}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "lora/*", "litellm_params": served}]}
    with (
        litellm(tmp_path, json.dumps(config)) as proxy,
        openai.OpenAI(base_url=f"{proxy.base_url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        assert_as_peft(real, client, f"lora/{CHAT}", has_ids_in_streams=False)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.skipif(OPEN_WEBUI is None, reason="pip install open-webui in an environment of its own, on PATH")
def test_an_adapters_own_chat_answers_through_open_webui(real: Real, tmp_path: Path) -> None:
    settings = {"OPENAI_API_BASE_URLS": f"{real.server.url}/v1", "OPENAI_API_KEYS": "none"}
    with open_webui(tmp_path, settings) as page:
        assert CHAT in [model["id"] for model in page.get("/api/models").json()["data"]]
        key = page.headers["Authorization"].removeprefix("Bearer ")
        with openai.OpenAI(base_url=f"{page.base_url}/api", api_key=key, max_retries=0) as client:
            assert_as_peft(real, client, CHAT)


def assert_as_peft(real: Real, client: openai.OpenAI, model: str, *, has_ids_in_streams: bool = True) -> None:
    """Whole and streamed: the answers of PEFT with the adapter's tokenizer, each ended by the adapter's end token.

    LiteLLM leaves ids out of streams: there text, end and numbers of tokens are compared.
    """
    questions = (QUESTION, "Who are you?")
    with ThreadPoolExecutor() as threads:
        wholes, streams = (
            [threads.submit(tell, client, model, question, is_streamed=is_streamed) for question in questions]
            for is_streamed in (False, True)
        )
    for question, whole, stream in zip(questions, wholes, streams, strict=True):
        expected = real.told(real.prompt(CHAT, question), whole.result().ids)
        assert expected.ids[-1] == real.tokenizer(CHAT).eos_token_id != real.reference.tokenizer.eos_token_id
        assert whole.result() == expected
        streamed = stream.result()
        assert streamed == (expected if has_ids_in_streams else replace(expected, ids=streamed.ids))


def tell(client: openai.OpenAI, model: str, question: str, *, is_streamed: bool, **more: Any) -> Told:
    """What a client gets of a greedy chat."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": LONGEST,
        "temperature": 0,
        "extra_body": {"return_token_ids": True, **more},
    }
    if not is_streamed:
        answer = client.chat.completions.create(**asked)
        (choice,), usage = answer.choices, answer.usage
        ids = getattr(choice, "token_ids", None) or choice.provider_specific_fields["token_ids"]  # as LiteLLM has them
        return Told(
            tuple(ids), choice.message.content, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens
        )
    streamed: list[int] = []
    text, ended, counts = "", None, (0, 0)
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        if chunk.usage:
            counts = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        for choice in chunk.choices:
            streamed += getattr(choice, "token_ids", None) or []
            text += choice.delta.content or ""
            ended = choice.finish_reason or ended
    return Told(tuple(streamed), text, ended, *counts)
