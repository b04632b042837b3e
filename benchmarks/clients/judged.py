"""Whose answers a program got: PEFT computes the same prompt, greedily, with the adapter that the program named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recorder import Call
from testbed.reference import Reference

TOKENS = 8  # of an answer that are compared
LOOKED_AT = 4  # answers of each name
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a stream holds bytes back until they are a whole character


def text_of(answer: str) -> str:
    """The text of an answer of any of the routes, in one piece or streamed."""
    if answer.startswith("{"):
        return _text(json.loads(answer))
    pieces = (line.removeprefix("data:").strip() for line in answer.splitlines() if line.startswith("data:"))
    return "".join(_piece(json.loads(piece)) for piece in pieces if piece.startswith("{"))


def _text(answer: Mapping[str, Any]) -> str:
    if "choices" in answer:
        first = answer["choices"][0]
        return str(first["text"] if "text" in first else first["message"]["content"] or "")
    parts = answer.get("content") or [
        part for one in answer["output"] if one["type"] == "message" for part in one["content"]
    ]
    return "".join(part.get("text", "") for part in parts)


def _piece(event: Mapping[str, Any]) -> str:
    if event.get("choices"):
        first = event["choices"][0]
        return str(first.get("text") or (first.get("delta") or {}).get("content") or "")
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    return str(event["delta"]) if event.get("type") == "response.output_text.delta" else ""


def prompt_of(call: Call, reference: Reference) -> list[int]:
    """The token ids that a call's prompt has, as the base model's tokenizer and template make them."""
    body = call.body
    if "prompt" in body:
        prompt = body["prompt"]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            (prompt,) = prompt  # lm-eval sends a batch of one
        return list(prompt) if isinstance(prompt, list) else reference.prompt_ids(prompt)
    given = body.get("messages", body.get("input"))
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    if first := body.get("system") or body.get("instructions"):
        messages = [{"role": "system", "content": first}, *messages]
    return reference.chat_ids([{"role": it["role"], "content": _flat(it["content"])} for it in messages])


def _flat(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def fault_of(call: Call, adapter: Path, reference: Reference, others: Sequence[Path]) -> str | None:
    """Why a call's answer is not the adapter's, or None."""
    if call.status != 200:
        return f"{call.model}: {call.status}: {call.answer[:200]}"
    limits = [call.body[name] for name in _LIMITS if call.body.get(name)]
    count = min([TOKENS, *limits])
    prompt, said = prompt_of(call, reference), text_of(call.answer)
    ends = () if call.body.get("ignore_eos") else (reference.tokenizer.eos_token_id,)

    def is_of(one: Path) -> bool:
        ids = reference.generate(one, prompt, count, ends)
        expected = _whole(reference.tokenizer.decode(ids, skip_special_tokens=True))
        return _whole(said).startswith(expected) if limits != [count] else _whole(said) == expected

    if is_of(adapter):
        return None
    owner = next((one.name for one in others if is_of(one)), "nobody")
    return f"{call.model}: an answer of {owner}: {said[:60]!r}"


def _whole(text: str) -> str:
    """Text without broken characters at its ends: a stream also repeats those that its prompt ends with."""
    return re.sub(f"{_UNFINISHED}+", _UNFINISHED, text).strip(_UNFINISHED)


def faults_of(
    calls: Sequence[Call], adapters: Mapping[str, Path], digests: Mapping[str, str], reference: Reference
) -> list[str]:
    """What is wrong with a program's calls: each name answered, with its own digest and its own words."""
    faults = []
    for name, adapter in adapters.items():
        own = [call for call in calls if call.model == name]
        faults += [] if own else [f"{name} was never asked for"]
        others = [one for one in adapters.values() if one != adapter]
        faults += [fault for call in own[:LOOKED_AT] if (fault := fault_of(call, adapter, reference, others))]
        faults += [f"{name}: the digest {call.digest}" for call in own if call.digest != digests[name]][:1]
    return faults
