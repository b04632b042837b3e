"""Chat adapters with templates, special tokens and end tokens of their own, in one batch on a real server.

Prompts and answers equal PEFT's with the tokenizer that lies beside the adapter, as trainers save both.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoTokenizer

from testbed.bed import Bed
from testbed.client import PLAIN_HTTP, way_to
from testbed.reference import Reference
from testbed.server import Server
from testbed.trained_tokens import train_tokens
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server

MAX_TOKENS = 24
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick brown fox"}]
TOOLS = [{"type": "function", "function": {"name": "jump", "parameters": {"type": "object", "properties": {}}}}]
# Tokens that a trainer has added, on ids that the base model's matrices have and its tokenizer lacks.
WORDS = ["<call>", "</call>", *(f"<word{number}>" for number in range(80))]
SPECIAL = ["<think>", *(f"<special{number}>" for number in range(30))]
TEXT = "say <call>fox</call> <think>now <word7> <word8>"
TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
ASKED = "{% if add_generation_prompt %}[assistant]{% endif %}"
WITH_TOOLS = "{{ bos_token }}{% for t in tools %}<{{ t.function.name }}>{% endfor %}" + TURNS + ASKED
NAMED = [{"name": "default", "template": "one:" + TURNS}, {"name": "tool_use", "template": WITH_TOOLS}]

# Name → what its tokenizer has otherwise than the base model's, whether the template is a key of the configuration, and
# after how many of its own tokens an end token comes (a text's, or an id of its generation configuration).
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "file": {"template": "{{ bos_token }}" + TURNS + ASKED},
    "key": {"template": TURNS + ASKED, "is_key": True},
    "named": {"template": NAMED, "is_key": True},
    "tokens": {
        "template": "{{ bos_token }}{{ pad_token }}" + TURNS,
        "tokens": {"bos_token": "</s>", "pad_token": "<s>"},
    },
    "ends": {"ends_at": 6},
    "ends-by-id": {"ends_at_id": 9},
    "ends-twice": {"ends_at": 11, "ends_at_id": 4},
    "all": {"template": "all:" + TURNS + ASKED, "ends_at_id": 12},
    "nothing": {"template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
    "thinks": {"template": TURNS + "{% if enable_thinking %}<think>{% endif %}"},
    "base-too": {"template": None},
    "adds": {"adds": (WORDS, SPECIAL), "template": "<think>" + TURNS + "<call>"},
    "adds-in-config": {"adds": (SPECIAL, WORDS), "is_old": True},
    "adds-an-end": {"adds": (WORDS, SPECIAL), "ends_at_added": True},
    # PEFT has trained rows of the first token added, and of the template's last one.
    "trained": {"adds": (WORDS, SPECIAL), "template": "<think>" + TURNS + "<call>", "trains": ["<call>", "<think>"]},
}


@dataclass(frozen=True)
class Chats:
    """A server, and what PEFT says of each adapter."""

    server: Server
    base: str
    reference: Reference
    adapters: Path

    def tokenizer(self, name: str) -> Any:
        return AutoTokenizer.from_pretrained(self.adapters / name)

    def prompt(self, name: str, **more: Any) -> list[int]:
        own = self.tokenizer(name if (self.adapters / name / "tokenizer.json").exists() else "plain-tokenizer")
        text = own.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **more)
        return [int(token) for token in own(text, add_special_tokens=False)["input_ids"]]

    def answer(self, name: str, prompt: Sequence[int]) -> list[int]:
        """PEFT's tokens up to the first end token."""
        ids = self.reference.generate(self.adapters / name, prompt, MAX_TOKENS)
        ends = end_ids(self.adapters / name, self.reference.tokenizer)
        return ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), MAX_TOKENS)]


def end_ids(adapter: Path, base: Any) -> set[int]:
    """What PEFT would be given as `eos_token_id`: the base model's, and the adapter's."""
    ends = {base.eos_token_id}
    if (adapter / "tokenizer_config.json").exists():
        ends.add(AutoTokenizer.from_pretrained(adapter).eos_token_id)
    if (adapter / "generation_config.json").exists():
        ends.update(json.loads((adapter / "generation_config.json").read_text())["eos_token_id"])
    return ends


@pytest.fixture(scope="module")
def chats(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    home = tmp_path_factory.mktemp("chats")
    root, reference = home / "adapters", Reference(bed.base)
    reference.tokenizer.save_pretrained(root / "plain-tokenizer")
    for number, (name, kind) in enumerate(ADAPTERS.items()):
        shutil.copytree(bed.adapters / ("sql", "chat", "stable")[number % 3], root / name)
        write_chat(root / name, reference, **kind)
    with lora_server(
        bed, home, "--max-loras", "4", "--max-cpu-loras", "16", plugins=(RESOLVER, MANAGER, KERNELS, ADMIN)
    ) as server:
        yield Chats(server, str(bed.base), reference, root)


def write_chat(
    adapter: Path,
    reference: Reference,
    *,
    template: Any = None,
    is_key: bool = False,
    tokens: dict[str, str] | None = None,
    ends_at: int | None = None,
    ends_at_id: int | None = None,
    adds: tuple[list[str], list[str]] = ([], []),
    is_old: bool = False,
    ends_at_added: bool = False,
    trains: Sequence[str] = (),
) -> None:
    """Save a tokenizer beside the adapter as trainers do; an end token is one that the adapter's answer has."""
    own = AutoTokenizer.from_pretrained(reference.base)
    for name, text in (tokens or {}).items():
        setattr(own, name, text)
    if template is not None:
        own.chat_template = template if isinstance(template, str) else {it["name"]: it["template"] for it in template}
    own.add_tokens(adds[0])
    own.add_tokens(adds[1], special_tokens=True)
    if template is None and tokens is None and ends_at is None and ends_at_id is None and not adds[0]:
        return
    own.save_pretrained(adapter, save_jinja_files=not is_key)
    if is_old:  # Transformers 4 listed the tokens here, too
        config = json.loads((adapter / "tokenizer_config.json").read_text())
        fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        config["added_tokens_decoder"] = {
            str(token): {field: getattr(it, field) for field in fields}
            for token, it in own.added_tokens_decoder.items()
        }
        (adapter / "tokenizer_config.json").write_text(json.dumps(config))
    if trains:
        ids = own.convert_tokens_to_ids(list(trains))
        train_tokens(adapter, {"model.embed_tokens": ids, "lm_head": ids}, features=256)
    text = own.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    answer = reference.generate(adapter, own(text, add_special_tokens=False)["input_ids"], MAX_TOKENS)
    if ends_at_added:
        ends_at = next(place for place, token in enumerate(answer) if token >= len(reference.tokenizer))
    if ends_at is not None:
        config = json.loads((adapter / "tokenizer_config.json").read_text())
        config["eos_token"] = own.convert_ids_to_tokens(answer[ends_at])
        (adapter / "tokenizer_config.json").write_text(json.dumps(config))
    if ends_at_id is not None:
        (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, answer[ends_at_id]]}))


async def asked(chats: Chats, names: Sequence[str], **more: Any) -> list[Any]:
    """One chat of each, all at once."""
    async with openai.AsyncOpenAI(**way_to(chats.server)) as client:
        return await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=name,
                    messages=MESSAGES,  # type: ignore[arg-type]
                    max_tokens=MAX_TOKENS,
                    temperature=0,
                    **{"extra_body": {"return_token_ids": True}, **more},
                )
                for name in names
            )
        )


def test_chats_in_one_batch_are_those_of_peft(chats: Chats) -> None:
    answers = asyncio.run(asked(chats, list(ADAPTERS)))
    for name, answer in zip(ADAPTERS, answers, strict=True):
        prompt = chats.prompt(name)
        assert answer.prompt_token_ids == prompt, name
        assert answer.choices[0].token_ids == chats.answer(name, prompt), name
    lengths = [len(answer.choices[0].token_ids) for answer in answers]
    assert min(lengths) < MAX_TOKENS == max(lengths)  # some end by a token of theirs


def test_streams_tools_and_arguments_of_templates_are_those_of_peft(chats: Chats) -> None:
    tools = {"tools": TOOLS, "tool_choice": "none"}
    thinking = {"extra_body": {"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": True}}}
    (named,), (thinks,) = (
        asyncio.run(asked(chats, ["named"], **tools)),
        asyncio.run(asked(chats, ["thinks"], **thinking)),
    )
    for name, answer, more in (("named", named, {"tools": TOOLS}), ("thinks", thinks, {"enable_thinking": True})):
        prompt = chats.prompt(name, **more)
        assert answer.prompt_token_ids == prompt
        assert answer.choices[0].token_ids == chats.answer(name, prompt)
    with openai.OpenAI(**way_to(chats.server)) as client:
        stream = client.chat.completions.create(
            model="all",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        pieces = [choice for chunk in stream for choice in chunk.choices]
    ids = [token for choice in pieces for token in getattr(choice, "token_ids", None) or ()]
    assert ids == chats.answer("all", chats.prompt("all"))
    assert pieces[-1].finish_reason == "stop"


def chosen(chats: Chats, name: str, prompt: Sequence[int], texts: Sequence[str]) -> list[int]:
    """PEFT's greedy tokens where the text can only become one of `texts`."""
    model, ids, said = chats.reference.load(chats.adapters / name), list(prompt), ""
    words = [chats.reference.tokenizer.decode([token]) for token in range(len(chats.reference.tokenizer))]
    while said not in texts:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        fits = [token for token, word in enumerate(words) if word and any(it.startswith(said + word) for it in texts)]
        ids.append(max(fits, key=lambda token: float(logits[token])))
        said += words[ids[-1]]
    return ids[len(prompt) :]


def test_answers_in_a_format_are_those_of_peft(chats: Chats) -> None:
    texts = [f'"{word}"' for word in ("quick", "brown", "lazy", "jumps")]
    schema = {"name": "word", "schema": {"type": "string", "enum": [text.strip('"') for text in texts]}}
    names = ("plain", "file", "named", "ends-by-id", "all")
    form = {"type": "json_schema", "json_schema": schema}
    for name, answer in zip(names, asyncio.run(asked(chats, names, response_format=form)), strict=True):
        prompt = chats.prompt(name)
        assert answer.prompt_token_ids == prompt, name
        assert answer.choices[0].message.content in texts, name
        ids = answer.choices[0].token_ids
        assert ids[:-1] == chosen(chats, name, prompt, texts), name
        assert ids[-1] in end_ids(chats.adapters / name, chats.reference.tokenizer), name


def said_of_words(chats: Chats, own: Any, name: str, number: int) -> tuple[str, list[int], list[str]] | None:
    """A prompt, PEFT's answer, and the added tokens in the answer's text; None for an answer with fewer than two."""
    text = f"{TEXT} {own.convert_ids_to_tokens(len(chats.reference.tokenizer) + number)}"
    ids = chats.reference.generate(chats.adapters / name, own(text)["input_ids"], MAX_TOKENS)
    added = [token for token in ids if token >= len(chats.reference.tokenizer)]
    words = [own.convert_ids_to_tokens(token) for token in added if token not in own.all_special_ids]
    return (text, ids, words) if words and len(added) > 1 and ids[0] not in added and None not in words else None


@pytest.mark.parametrize("name", ["adds", "adds-in-config", "trained"])
def test_texts_of_added_tokens_are_those_of_peft(chats: Chats, name: str) -> None:
    own = chats.tokenizer(name)
    text, ids, words = next(filter(None, (said_of_words(chats, own, name, number) for number in range(30))))
    prompt = [int(token) for token in own(text)["input_ids"]]
    assert len(prompt) < len(chats.reference.tokenizer(text)["input_ids"])
    limits = {"model": name, "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    with httpx.Client(base_url=chats.server.url, verify=PLAIN_HTTP, timeout=120) as client:

        def completed(**body: Any) -> Any:
            response = client.post("/v1/completions", json={**limits, "prompt": text, "return_token_ids": True, **body})
            assert response.status_code == 200, response.text
            return response

        whole = completed(logprobs=1).json()["choices"][0]
        assert (whole["prompt_token_ids"], whole["token_ids"]) == (prompt, ids)
        assert whole["text"] == own.decode(ids, skip_special_tokens=True)
        assert {*words} <= {*whole["logprobs"]["tokens"]}
        every = completed(skip_special_tokens=False, spaces_between_special_tokens=False).json()["choices"][0]
        assert every["text"] == own.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
        events = completed(stream=True).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
        stopped = completed(stop=[words[0]]).json()["choices"][0]
        assert (stopped["text"], stopped["stop_reason"]) == (whole["text"].split(words[0])[0], words[0])
        cut = client.post("/tokenize", json={"model": name, "prompt": text, "return_token_strs": True}).json()
        assert (cut["tokens"], cut["token_strs"]) == (prompt, own.convert_ids_to_tokens(prompt))
        assert client.post("/detokenize", json={"model": name, "tokens": ids}).json()["prompt"] == own.decode(ids)
        echoed = completed(prompt=prompt, echo=True, return_token_ids=False).json()["choices"][0]["text"]
        assert echoed == own.decode(prompt) + whole["text"]
        of_base = client.post("/tokenize", json={"model": "plain", "prompt": text}).json()
        assert of_base["tokens"] == chats.reference.prompt_ids(text)


def test_other_routes_have_the_same_prompts_and_ends(chats: Chats) -> None:
    prompt = chats.prompt("all")
    answer = chats.answer("all", prompt)
    text = chats.reference.tokenizer.decode(answer[:-1])  # the end token is no part of the text
    with httpx.Client(base_url=chats.server.url, verify=PLAIN_HTTP, timeout=120) as client:

        def posted(path: str, **body: Any) -> Any:
            response = client.post(path, json={"model": "all", **body})
            assert response.status_code == 200, response.text
            return response.json()

        assert posted("/tokenize", messages=MESSAGES)["tokens"] == prompt
        limits = {"temperature": 0, "max_tokens": MAX_TOKENS}
        completed = posted("/v1/completions", prompt=prompt, **limits)
        message = posted("/v1/messages", system=MESSAGES[0]["content"], messages=MESSAGES[1:], **limits)
        of_instructions = {"instructions": MESSAGES[0]["content"], "input": MESSAGES[1]["content"]}
        response = posted("/v1/responses", **of_instructions, temperature=0, max_output_tokens=MAX_TOKENS)
    assert completed["choices"][0]["text"] == text
    assert [item["text"] for item in message["content"]] == [text]
    assert message["stop_reason"] == "end_turn"
    assert response["output"][0]["content"][0]["text"] == text
    assert response["usage"]["input_tokens"] == len(prompt)


def test_added_tokens_are_tokens_on_other_routes_too(chats: Chats) -> None:
    own, prompt = chats.tokenizer("adds"), chats.prompt("adds")
    # VLLM keeps back the bytes of a character that the last tokens have begun.
    text = own.decode(chats.answer("adds", prompt), skip_special_tokens=True).rstrip("\ufffd")
    assert any(word in text for word in WORDS)
    by_base = chats.reference.tokenizer(own.decode(prompt), add_special_tokens=False)["input_ids"]
    assert len(prompt) < len(by_base)
    limits = {"model": "adds", "temperature": 0}
    body = {"system": MESSAGES[0]["content"], "messages": MESSAGES[1:], "max_tokens": MAX_TOKENS}
    of_instructions = {"instructions": MESSAGES[0]["content"], "input": MESSAGES[1]["content"]}
    with httpx.Client(base_url=chats.server.url, verify=PLAIN_HTTP, timeout=120) as client:
        message = client.post("/v1/messages", json=limits | body).raise_for_status().json()
        body = {**of_instructions, "max_output_tokens": MAX_TOKENS}
        response = client.post("/v1/responses", json=limits | body).raise_for_status().json()
    assert [item["text"] for item in message["content"]] == [text]
    assert response["output"][0]["content"][0]["text"] == text
    assert message["usage"]["input_tokens"] == response["usage"]["input_tokens"] == len(prompt)


def test_what_the_client_says_of_ends_wins(chats: Chats) -> None:
    prompt = chats.prompt("ends")
    full = chats.reference.generate(chats.adapters / "ends", prompt, MAX_TOKENS)
    own = {"return_token_ids": True, "stop_token_ids": [full[2]]}
    (ignored,) = asyncio.run(asked(chats, ["ends"], extra_body={"return_token_ids": True, "ignore_eos": True}))
    (stopped,) = asyncio.run(asked(chats, ["ends"], extra_body=own))
    assert ignored.choices[0].token_ids == full
    assert stopped.choices[0].token_ids == full[: full.index(full[2]) + 1]


def test_the_server_says_which_chats_it_serves(chats: Chats) -> None:
    with httpx.Client(base_url=chats.server.url, verify=PLAIN_HTTP, timeout=60) as client:
        for name in ("plain", "all"):
            client.post(f"/v1/loras/{name}/prefetch").raise_for_status()
        client.post("/v1/loras/adds/prefetch").raise_for_status()
        adds = client.get("/v1/loras/adds").json()["chat"]["added_tokens"]
        plain, own = (client.get(f"/v1/loras/{name}").json()["chat"] for name in ("plain", "all"))
    assert plain is None
    assert (own["added_tokens"], own["lost_tokens"]) == ({}, {})
    assert list(adds.items())[:2] == [("<call>", 374), ("</call>", 375)]
    assert len(adds) == len(WORDS + SPECIAL)
    assert own["template"]
    assert own["special_tokens"]["bos_token"] == "<s>"
    assert own["end_token"] == "</s>"
    assert set(own["end_ids"]) == end_ids(chats.adapters / "all", chats.reference.tokenizer)


def test_a_swap_swaps_template_and_ends_with_the_weights(chats: Chats) -> None:
    (before,) = asyncio.run(asked(chats, ["base-too"]))
    assert before.prompt_token_ids == chats.prompt("base-too")
    for path in (chats.adapters / "all").iterdir():
        shutil.copy(path, chats.adapters / "base-too" / path.name)
    httpx.post(f"{chats.server.url}/v1/loras/base-too/refresh", verify=PLAIN_HTTP, timeout=60).raise_for_status()
    (after,) = asyncio.run(asked(chats, ["base-too"]))
    prompt = chats.prompt("all")
    assert after.prompt_token_ids == prompt != before.prompt_token_ids
    assert after.choices[0].token_ids == chats.answer("all", prompt)
