"""The base model's tokenizer with the tokens that an adapter adds, for the prompts and answers of the adapter.

Trainers add tokens on ids that the base model's padded vocabulary has and its tokenizer does not, or rename reserved
tokens. A tokenizer of Transformers is one text of JSON: the list of its added tokens is exchanged, the rest stays.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lora_plugins.adapter.chat import AddedToken, Chat

_MOST = 8  # tokenizers of different added tokens in memory; one with 150,000 words has 100 MB, and takes a second
# Of tokens that the base model lacks: making a tokenizer takes 80 times the bytes of their texts in memory, and seconds
# for each MiB.
_MOST_NEW, _NEW_BYTES = 20_000, 1 << 20
_ADDED = '"added_tokens":'


def served_chat(base: Any, vocabulary: int, chat: Chat) -> Chat:
    """Leave of the added tokens only those that the base model's tokenizer lacks, or has on another id."""
    words = {} if base is None else base.get_vocab()
    added = tuple(token for token in chat.added_tokens if words.get(token.text) != token.id)
    if base is None or not added:
        return replace(chat, added_tokens=())
    few_enough = len(added) <= _MOST_NEW and sum(len(token.text.encode()) for token in added) <= _NEW_BYTES
    if few_enough and added[-1].id < vocabulary and tokenizer_with(base, added) is not None:
        return replace(chat, added_tokens=added)
    return replace(chat, added_tokens=(), lost_tokens=added)


def tokenizer_of(base: Any, chat: Chat) -> Any:
    """The tokenizer for an adapter's prompts and answers: the base model's, where the adapter adds no tokens."""
    return tokenizer_with(base, chat.added_tokens) if chat.added_tokens else base


async def renderer_of(renderer: Any, chat: Chat) -> Any:
    """VLLM's renderer for one request of an adapter: a copy with the adapter's tokenizer, or `renderer` itself.

    Touches:
        vllm.renderers.base:
            BaseRenderer._tokenize_prompt(self, prompt, params)
            BaseRenderer._decode(self, ...)
            BaseRenderer{tokenizer, _executor, _tokenize_prompt_async, _async_tokenizer_decode}
        vllm.tokenizers.hf: get_cached_tokenizer(tokenizer) maybe_make_thread_pool(tokenizer, ...)
        vllm.utils.async_utils: make_async(func, ...)
    Why: an adapter that was trained with tokens of its own gets prompts of other tokens, and answers without text.
    Until: vLLM has a tokenizer for each adapter again.
    """
    from vllm.utils.async_utils import make_async

    if not chat.added_tokens:
        return renderer
    own = copy.copy(renderer)
    own.tokenizer = await asyncio.to_thread(tokenizer_of, renderer.tokenizer, chat)
    # vLLM binds these to the original.
    own._tokenize_prompt_async = make_async(own._tokenize_prompt, executor=own._executor)  # noqa: SLF001
    own._async_tokenizer_decode = make_async(own._decode, executor=own._executor)  # noqa: SLF001
    return own


@lru_cache(_MOST)
def tokenizer_with(base: Any, added: tuple[AddedToken, ...]) -> Any:
    """The base model's tokenizer with added tokens; None where a token would get another id, or is not of this kind."""
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

    # vLLM's wrappers name what they wrap for pickling.
    while (parts := base.__reduce_ex__(4))[0] in (maybe_make_thread_pool, get_cached_tokenizer):
        base = parts[1][0]
    if not isinstance(base, PreTrainedTokenizerFast):
        return None
    text = base.backend_tokenizer.to_str()
    begin = text.index(_ADDED) + len(_ADDED)
    entries, end = json.JSONDecoder().raw_decode(text, begin)
    listed = {entry["id"]: entry for entry in entries} | {token.id: token.entry() for token in added}
    changed = json.dumps([listed[token] for token in sorted(listed)])
    own = copy.copy(base)
    own._tokenizer = type(base.backend_tokenizer).from_str(text[:begin] + changed + text[end:])  # noqa: SLF001
    if not _has(own.get_vocab(), base.get_vocab(), added):
        return None
    return maybe_make_thread_pool(get_cached_tokenizer(own))


def _has(words: Mapping[str, int], of_base: Mapping[str, int], added: tuple[AddedToken, ...]) -> bool:
    """Whether every added token has its id, and every other token of the base model keeps its own."""
    ids = {token.id for token in added}
    kept = all(words.get(text) == token for text, token in of_base.items() if token not in ids)
    return kept and all(words.get(token.text) == token.id for token in added)
