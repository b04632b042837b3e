"""The base model's tokenizer with the tokens that an adapter adds, for the prompts and answers of the adapter.

`adapter_chats.py` calls these functions in API servers. Trainers add tokens on ids that the base model's padded
vocabulary has and its tokenizer does not, or rename reserved tokens. A tokenizer of Transformers is one text of JSON:
the list of added tokens is exchanged, and perhaps the post-processor (which adds tokens such as BOS around each text);
the rest stays.
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
# The most tokens that the base model lacks, and bytes of their texts: making a tokenizer takes 80 times these bytes of
# memory, and seconds for each MiB.
_MOST_NEW, _NEW_BYTES = 20_000, 1 << 20
_ADDED, _POST = '"added_tokens":', '"post_processor":'
_PROBE = "a"  # a text whose tokens show what a post-processor adds


def served_chat(base: Any, vocabulary: int, chat: Chat) -> Chat:
    """Return `chat` with those parts of the adapter's tokenizer that differ from the base model's and can be served.

    Tokens that cannot be served are `lost_tokens`; a post-processor that cannot be served is named in `unused`.

    Args:
        base: the base model's tokenizer, or None where vLLM has none.
        vocabulary: the number of token ids that the model has.
        chat: of the adapter's files.
    """
    if base is None:
        return replace(chat, added_tokens=(), post_processor="")
    words = base.get_vocab()
    # `chat` may be the result of an earlier call, so lost tokens are tried again.
    new = tuple(token for token in (*chat.added_tokens, *chat.lost_tokens) if words.get(token.text) != token.id)
    few_enough = len(new) <= _MOST_NEW and sum(len(token.text.encode()) for token in new) <= _NEW_BYTES
    is_taken = not new or (few_enough and new[-1].id < vocabulary and tokenizer_with(base, new) is not None)
    added, lost = (new, ()) if is_taken else ((), new)
    chat = replace(chat, added_tokens=added, lost_tokens=lost)
    # The post-processor of the base model, as JSON; `null` for none.
    of_base = getattr(getattr(base, "backend_tokenizer", None), "post_processor", None)
    made = "null" if of_base is None else of_base.__getstate__()
    is_same = not chat.post_processor or json.loads(chat.post_processor) == json.loads(made)
    own = base if is_same else tokenizer_with(base, added, chat.post_processor)
    # `own` is None where the base model's tokenizer cannot take the post-processor.
    if own is not None and max(ids := own.encode(_PROBE), default=0) < vocabulary:
        # A post-processor that adds the same tokens as the base model's needs no tokenizer of its own.
        return chat if ids != base.encode(_PROBE) else replace(chat, post_processor="")
    unused = (*chat.unused, "post_processor of tokenizer.json (the base model's tokenizer cannot take it)")
    return replace(chat, post_processor="", unused=unused)


def tokenizer_of(base: Any, chat: Chat) -> Any:
    """Return the tokenizer for an adapter's prompts and answers: `base`, where the adapter changes nothing."""
    is_other = chat.added_tokens or chat.post_processor
    return tokenizer_with(base, chat.added_tokens, chat.post_processor) if is_other else base


async def renderer_of(renderer: Any, chat: Chat) -> Any:
    """Return vLLM's renderer for a request of an adapter: a copy with the adapter's tokenizer, or `renderer` itself.

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

    tokenizer = await asyncio.to_thread(tokenizer_of, renderer.tokenizer, chat)
    if tokenizer is renderer.tokenizer:
        return renderer
    own = copy.copy(renderer)
    own.tokenizer = tokenizer
    # vLLM binds these two functions to the original renderer when it makes the renderer.
    own._tokenize_prompt_async = make_async(own._tokenize_prompt, executor=own._executor)  # noqa: SLF001
    own._async_tokenizer_decode = make_async(own._decode, executor=own._executor)  # noqa: SLF001
    return own


@lru_cache(_MOST)
def tokenizer_with(base: Any, added: tuple[AddedToken, ...], post_processor: str = "") -> Any:
    """Return the base model's tokenizer with added tokens, and with `post_processor` (JSON) if not empty.

    None where a token would get another id, or where the tokenizer is none of Transformers' fast tokenizers.
    """
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

    # vLLM wraps the tokenizer, perhaps twice. For pickling, a wrapper names the function that made it and its argument.
    while (parts := base.__reduce_ex__(4))[0] in (maybe_make_thread_pool, get_cached_tokenizer):
        base = parts[1][0]
    if not isinstance(base, PreTrainedTokenizerFast):
        return None
    text = base.backend_tokenizer.to_str()
    begin = text.index(_ADDED) + len(_ADDED)
    entries, end = json.JSONDecoder().raw_decode(text, begin)
    listed = {entry["id"]: entry for entry in entries} | {token.id: token.entry() for token in added}
    changed = json.dumps([listed[token] for token in sorted(listed)])
    text = text[:begin] + changed + text[end:]
    if post_processor:
        begin = text.index(_POST, begin + len(changed)) + len(_POST)
        _, end = json.JSONDecoder().raw_decode(text, begin)
        text = text[:begin] + post_processor + text[end:]
    # A shallow copy with another tokenizer of the `tokenizers` package inside.
    own = copy.copy(base)
    try:
        own._tokenizer = type(base.backend_tokenizer).from_str(text)  # noqa: SLF001
    except Exception:  # noqa: BLE001 - the class that `tokenizers` raises, for a post-processor that it does not know
        return None
    if not _has(own.get_vocab(), base.get_vocab(), added):
        return None
    return maybe_make_thread_pool(get_cached_tokenizer(own))


def _has(words: Mapping[str, int], of_base: Mapping[str, int], added: tuple[AddedToken, ...]) -> bool:
    """Return whether every added token has its id, and every other token of the base model keeps its own."""
    ids = {token.id for token in added}
    kept = all(words.get(text) == token for text, token in of_base.items() if token not in ids)
    return kept and all(words.get(token.text) == token.id for token in added)
