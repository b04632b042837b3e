"""Chats of an adapter get the adapter's own template, special tokens and end tokens, where its version brings them.

vLLM reads these from the base model's directory only, and warns of the adapter's (`maybe_init_lora`, 0.32). Every route
that makes a prompt of messages does so by `OnlineRenderer.preprocess_chat`, and every request enters the engine by
`InputProcessor.process_inputs` (0.30 to 0.33). Both look at the version that the request will run with, or runs with.
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

from lora_plugins.adapter.chat import Chat, read_chat
from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.process import this_process
from lora_plugins.settings import AdapterChat
from lora_plugins.vllm_patches.wrapping import wrap

_MOST = 512  # versions whose chats are kept in memory
_TRIES = 3

_read: dict[Path, Chat] = {}  # by snapshots, which never change


def patch() -> None:
    """Wrap vLLM's renderer and input processor in this process; a second call changes nothing."""
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(OnlineRenderer, "preprocess_chat", _rendering)
    wrap(InputProcessor, "process_inputs", _ending)


def _directory_of(request: Any) -> Path | None:
    """The snapshot of a `LoRARequest`; None for files that may change, and where the settings want the base's chats."""
    process = this_process()
    if request is None or not process.is_resolver_registered or process.settings.adapter_chat is AdapterChat.BASE:
        return None
    layout = process.resolver.store.layout
    digest = layout.digest_of(request.lora_path)
    return None if digest is None else layout.adapter(digest)


async def _chat_of(name: str | None) -> Chat:
    """What the version brings that is served under a name now."""
    requests = (table.lora_requests.get(name) for table in this_process().tables)
    directory = _directory_of(next(requests, None))
    if directory is None:
        return Chat()
    return _read[directory] if directory in _read else await asyncio.to_thread(_chat_at, directory)


def _chat_at(directory: Path) -> Chat:
    if directory not in _read:
        try:
            chat = read_chat(directory)
        except LoRAPluginsError as error:
            raise http_error(error) from None
        while len(_read) >= _MOST:
            _read.pop(next(iter(_read)), None)
        _read[directory] = chat
    return _read[directory]


def _rendering(original: Any) -> Any:
    """Render with the adapter's template and tokens as defaults: a client's own template and arguments come first."""
    signature = inspect.signature(original)

    async def preprocess_chat(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        async def rendered(chat: Chat) -> Any:
            call = signature.bind(self, request, *args, **kwargs)
            template = chat.template_for(has_tools=bool(call.arguments.get("tool_dicts")))
            if template is not None:
                of_server = call.arguments["default_template_kwargs"] or {}
                call.arguments["default_template"] = template
                call.arguments["default_template_kwargs"] = {**chat.special_tokens, **of_server}
            return await original(*call.args, **call.kwargs)

        name = getattr(request, "model", None)
        chat = await _chat_of(name)
        result = await rendered(chat)
        # A swap meanwhile may have brought another template; from here to vLLM's look at the table, nothing awaits.
        for _ in range(_TRIES):
            before, chat = chat, await _chat_of(name)
            if chat == before:
                break
            result = await rendered(chat)
        return result

    return preprocess_chat


def _ending(original: Any) -> Any:
    """Have the adapter's end tokens end its answers, as vLLM has those of the base model's generation config."""

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        directory = _directory_of(made.lora_request)
        if directory is not None and made.sampling_params is not None and self.tokenizer is not None:
            ids = _end_ids(_chat_at(directory), self.tokenizer, self.model_config.get_vocab_size())
            if ids:
                fields, of_base = {"eos_token_id": ids}, self.renderer.get_eos_token_id()
                made.sampling_params.update_from_generation_config(fields, of_base)
        return made

    return process_inputs


def _end_ids(chat: Chat, tokenizer: Any, vocabulary: int) -> list[int]:
    """The ids of an adapter's end tokens in the base model's vocabulary, outside of which no token is ever sampled."""
    of_text = tokenizer.get_vocab().get(chat.special_tokens.get("eos_token"))
    return sorted({token for token in (of_text, *chat.end_ids) if token is not None and token < vocabulary})


LEDGER = (
    Patch(
        """
        vllm.renderers.online_renderer:
            OnlineRenderer.preprocess_chat(self, request, messages, default_template, default_template_content_format,
                default_template_kwargs, tool_dicts, ...)
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels{lora_requests}
        """,
        what="wrapped: the template and the special tokens of the adapter's version take the place of the defaults",
        why="a chat adapter is trained with a template of its own, and answers oddly with another",
        remove="vLLM renders a request with the template in its adapter's directory",
    ),
    Patch(
        """
        vllm.v1.engine.input_processor:
            InputProcessor.process_inputs(self, request_id, prompt, params, ...)
            InputProcessor{tokenizer, renderer, model_config}
        vllm.sampling_params:
            SamplingParams.update_from_generation_config(self, generation_config, eos_token_id)
        vllm.v1.engine:
            EngineCoreRequest{sampling_params, lora_request}
        """,
        what="wrapped: end tokens of the adapter's version are added, by vLLM's own function for a generation config",
        why="an adapter that was trained to end with another token never stops",
        remove="vLLM reads the end tokens in an adapter's directory",
    ),
)
