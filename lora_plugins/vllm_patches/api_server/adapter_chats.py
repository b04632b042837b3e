"""Chats of an adapter get the adapter's own template, special tokens and end tokens, where its version brings them.

vLLM reads these from the base model's directory only, and warns of the adapter's (`maybe_init_lora`, 0.32). Every route
that makes a prompt of messages does so by `OnlineRenderer.preprocess_chat`, and every request enters the engine by
`InputProcessor.process_inputs` (0.30 to 0.33). Both look at the version that the request will run with, or runs with.
"""

from __future__ import annotations

import inspect
from typing import Any

from lora_plugins.adapter.chat import Chat
from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.process import this_process
from lora_plugins.vllm_patches.wrapping import wrap

_TRIES = 3


def patch() -> None:
    """Wrap vLLM's renderer and input processor in this process; a second call changes nothing."""
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(OnlineRenderer, "preprocess_chat", _rendering)
    wrap(InputProcessor, "process_inputs", _ending)


def _path_of(request: Any) -> str:
    """The files of a `LoRARequest`; empty where our resolver brings no adapters."""
    return request.lora_path if request is not None and this_process().is_resolver_registered else ""


async def _chat_of(name: str | None) -> Chat:
    """What the version brings that is served under a name now."""
    process = this_process()
    path = _path_of(next((table.lora_requests.get(name) for table in process.tables), None))
    try:
        return await process.resolver.chats.read(path) if path else Chat()
    except LoRAPluginsError as error:
        raise http_error(error) from None


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
        path = _path_of(made.lora_request)
        if path and made.sampling_params is not None and self.tokenizer is not None:
            try:
                chat = this_process().resolver.chats.at(path)
            except LoRAPluginsError as error:
                raise http_error(error) from None
            if ids := _end_ids(chat, self.tokenizer, self.model_config.get_vocab_size()):
                fields, of_base = {"eos_token_id": ids}, self.renderer.get_eos_token_id()
                made.sampling_params.update_from_generation_config(fields, of_base)
        return made

    return process_inputs


def _end_ids(chat: Chat, tokenizer: Any, vocabulary: int) -> list[int]:
    """The ids of an adapter's end tokens in the base model's vocabulary, outside of which no token is ever sampled."""
    text = chat.special_tokens.get("eos_token")
    of_text = None if text is None else tokenizer.get_vocab().get(text)
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
