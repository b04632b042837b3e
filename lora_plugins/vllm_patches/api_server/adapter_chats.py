"""Requests of an adapter get the adapter's own chat template, tokens and end tokens, where its version brings them.

Runs in an API server, and in programs that use vLLM's engines. vLLM reads these from the base model's directory only,
and warns of the adapter's (`_validate_lora`). Wrapped are (0.30 to 0.33) `OnlineRenderer`, which makes prompts of
messages by `preprocess_chat` and of texts by `preprocess_completion`; `InputProcessor.process_inputs`, which makes
every request to the engine; `RequestState`, which makes text of answers; and `/tokenize`. In each, `Chats`
(`resolvers/chats.py`) says what the version of the request brings: a `Chat`, with a template, added tokens and end
tokens. `LORA_PLUGINS_ADAPTER_CHAT` says how much of the `Chat` is used (`AdapterChat`).
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Any

from lora_plugins.adapter.chat import PROCESSOR_FILE, Chat, few
from lora_plugins.adapter.mixture import canonical
from lora_plugins.api.access.principals import share_of_request
from lora_plugins.api.http_errors import as_http
from lora_plugins.errors import IncompatibleAdapter, describing
from lora_plugins.lifecycle.response import present
from lora_plugins.log import logger
from lora_plugins.process import this_process
from lora_plugins.resolvers.chats import Chats
from lora_plugins.settings import AdapterChat
from lora_plugins.store.disk_errors import DamagedCopy
from lora_plugins.vllm_patches.api_server.adapter_tokenizers import renderer_of, served_chat, tokenizer_of
from lora_plugins.vllm_patches.api_server.server_lifecycle import planned_lifecycle
from lora_plugins.vllm_patches.wrapping import signature_of, wrap

_TRIES = 3  # renderings of one request, while swaps go on


def patch() -> None:
    """Wrap vLLM's way from messages and texts to tokens and back, in this process; a second call changes nothing."""
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import RequestState

    wrap(OnlineRenderer, "preprocess_chat", _preprocess_chat)
    wrap(OnlineRenderer, "preprocess_completion", _preprocess_completion)
    wrap(InputProcessor, "process_inputs", _process_inputs)
    wrap(RequestState, "from_new_request", _from_new_request)
    for name in ("create_tokenize", "create_detokenize"):
        wrap(ServingTokenization, name, _tokenize)


def _mode() -> AdapterChat:
    return this_process().settings.adapter_chat


def _chats_for(request: Any) -> Chats | None:
    """Return this process's `Chats` for a request with an adapter; None for a request of the base model."""
    return None if request is None else this_process().resolver.chats


async def _chat_of(name: str | None) -> Chat:
    """Return what the version that is served under a name now brings; an empty `Chat` for the base model."""
    if _mode() is AdapterChat.STRICT:
        return Chat()  # no adapter's template runs before `_refuse_other` has seen it
    models, chat = this_process().models(), Chat()
    request: Any = None if models is None else models.lora_requests.get(canonical(name or ""))
    if (chats := _chats_for(request)) is not None:
        with as_http():
            try:
                chat = await chats.read(request.lora_path)
            except DamagedCopy:  # or removed from the store: `using` fetches the copy again, as for the engine
                if (lifecycle := planned_lifecycle(models)) is None:
                    raise
                async with lifecycle.copies.using(request, share_of_request()) as present_request:
                    chat = await chats.read(present_request.lora_path)
    if chat.warning:
        _warn(name, chat.warning)
        present().warnings[chat.warning] = None  # for the response: a dict as a set in order
    return chat


@lru_cache(1000)  # so that each name and warning is logged once
def _warn(name: str | None, warning: str) -> None:
    logger.warning("Adapter %r: %s", name, warning)


async def _rendered(name: str | None, render: Callable[[Chat], Awaitable[Any]]) -> Any:
    """Render with the `Chat` of a name's version, and again if a swap during the rendering brought another version."""
    chat = await _chat_of(name)
    result = await render(chat)
    # After the last `_chat_of`, nothing awaits until vLLM reads the table of served adapters: no swap comes between.
    for _ in range(_TRIES):
        before, chat = chat, await _chat_of(name)
        if chat == before:
            break
        result = await render(chat)
    return result


async def _with_tokens(serving: Any, chat: Chat) -> Any:
    """Return `serving`, or a copy whose renderer knows the adapter's tokens, where the adapter brings tokens."""
    renderer = await renderer_of(serving.renderer, chat)
    if renderer is not serving.renderer:
        serving = copy.copy(serving)
        serving.renderer = renderer
    return serving


async def _preprocess_chat(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Render with the adapter's template and tokens as defaults: a client's own template and arguments come first.

    Touches:
        vllm.renderers.online_renderer:
            OnlineRenderer.preprocess_chat(self, request, messages, default_template, default_template_content_format,
                default_template_kwargs, tool_dicts, ...)
            OnlineRenderer{renderer}
        vllm.entrypoints.openai.models.serving: OpenAIServingModels{lora_requests}
    Why: a chat adapter is trained with a template of its own, and answers oddly with another.
    Until: vLLM renders a request with the template in its adapter's directory.
    """

    async def render(chat: Chat) -> Any:
        call = signature_of(original).bind(await _with_tokens(self, chat), request, *args, **kwargs)
        template = chat.template_for(has_tools=bool(call.arguments.get("tool_dicts")))
        if template is not None:
            of_server = call.arguments["default_template_kwargs"] or {}
            call.arguments["default_template_kwargs"] = {**chat.special_tokens, **of_server}
            # The operator's template (`--chat-template`) wins over a trainer's mere copy of the base model's.
            is_copy = template.strip() in (text.strip() for text in _templates_of(self.renderer.tokenizer).values())
            has_other = call.arguments["default_template"] is not None and is_copy
            if not has_other and _mode() is not AdapterChat.TOKENS:
                call.arguments["default_template"] = template
        return await original(*call.args, **call.kwargs)

    return await _rendered(getattr(request, "model", None), render)


async def _preprocess_completion(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Cut texts into the adapter's tokens.

    Touches: vllm.renderers.online_renderer: OnlineRenderer.preprocess_completion(self, request, ...)
    Why: vLLM's one tokenizer is the base model's, which splits tokens that the adapter was trained with.
    Until: vLLM has a tokenizer for each adapter again.
    """

    async def render(chat: Chat) -> Any:
        return await original(await _with_tokens(self, chat), request, *args, **kwargs)

    return await _rendered(getattr(request, "model", None), render)


async def _tokenize(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer `/tokenize` and `/detokenize` with the adapter's tokens.

    Touches:
        vllm.entrypoints.serve.tokenize.serving:
            ServingTokenization.create_tokenize(self, request, ...)
            ServingTokenization.create_detokenize(self, request, ...)
            ServingTokenization{renderer, online_renderer}
    Why: the routes say how a prompt of the adapter is cut.
    Until: vLLM has a tokenizer for each adapter again.
    """
    # The check puts the adapter of a name that was not served yet into the table. vLLM checks too, but only after
    # `_chat_of` has read the table.
    if (error := await self._check_model(request)) is not None:
        return error
    serving = await _with_tokens(self, await _chat_of(request.model))
    return await original(serving, request, *args, **kwargs)


def _from_new_request(original: Any, tokenizer: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Have answers, stop strings and the texts of log-probabilities come from the adapter's tokens.

    Touches: vllm.v1.engine.output_processor: RequestState.from_new_request(cls, tokenizer, request, ...)
    Why: the base model's tokenizer has no text for the ids of tokens that a trainer has added.
    Until: vLLM has a tokenizer for each adapter again.
    """
    if tokenizer is not None and (chats := _chats_for(request.lora_request)) is not None:
        tokenizer = tokenizer_of(tokenizer, chats.at(request.lora_request.lora_path))
    return original(tokenizer, request, *args, **kwargs)


def know_tokenizer(chats: Chats, renderer: Any, model_config: Any) -> None:
    """Have versions that are read from now on keep only the added tokens that this engine's tokenizer can take in."""
    chats.served = chats.served or partial(served_chat, renderer.tokenizer, model_config.get_vocab_size())


def _process_inputs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Have the adapter's end tokens end its answers, as vLLM has those of the base model's generation config.

    Touches:
        vllm.v1.engine.input_processor:
            InputProcessor{tokenizer, renderer, model_config, process_inputs(self, request_id, prompt, params, ...)}
        vllm.sampling_params:
            SamplingParams.update_from_generation_config(self, generation_config, eos_token_id)
            SamplingParams.update_from_tokenizer(self, tokenizer)
        vllm.v1.engine: EngineCoreRequest{sampling_params, lora_request}
    Why: an adapter that was trained to end with another token never stops.
    Until: vLLM reads the end tokens in an adapter's directory.
    """
    made = original(self, *args, **kwargs)
    chats = _chats_for(made.lora_request)
    if chats is not None and made.sampling_params is not None and self.tokenizer is not None:
        know_tokenizer(chats, self.renderer, self.model_config)  # here for `LLM`, which has no table of models
        try:
            with as_http(), describing(adapter=made.lora_request.lora_name):
                chat = chats.at(made.lora_request.lora_path)
                if _mode() is AdapterChat.STRICT:
                    _refuse_other(chat, self)
        except Exception as error:
            present().error = error  # so that a stream that has not begun gets the error's status
            raise
        tokenizer = tokenizer_of(self.tokenizer, chat)
        if chat.added_tokens:
            made.sampling_params.update_from_tokenizer(tokenizer)  # which cuts bad_words into tokens
        if ids := _end_ids(chat, tokenizer, self.model_config.get_vocab_size()):
            fields, of_base = {"eos_token_id": ids}, self.renderer.get_eos_token_id()
            made.sampling_params.update_from_generation_config(fields, of_base)
    return made


def _refuse_other(chat: Chat, processor: Any) -> None:
    """Refuse an adapter that brings for chats what the base model does not have (LORA_PLUGINS_ADAPTER_CHAT=strict)."""
    # The end tokens of the server: the tokenizer's, and the generation config's, an id or a list of ids.
    tokenizer, of_server = processor.tokenizer, processor.generation_config_fields.get("eos_token_id") or ()
    ends = {tokenizer.eos_token_id, *((of_server,) if isinstance(of_server, int) else of_server)}
    templates = _templates_of(tokenizer)
    new_ends = [end for end in _end_ids(chat, tokenizer, processor.model_config.get_vocab_size()) if end not in ends]
    differs = [
        *(
            f"a chat template '{kind}'"
            for kind, text in chat.templates.items()
            if text.strip() != templates.get(kind, "").strip()
        ),
        *([f"end tokens {new_ends}"] if new_ends else ()),
        *([f"added tokens {few(tokens)}"] if (tokens := (*chat.added_tokens, *chat.lost_tokens)) else ()),
        *(f"an unusable {what}" for what in chat.unused if not what.startswith(PROCESSOR_FILE)),
        *(["another post_processor of tokenizer.json"] if chat.post_processor else ()),
    ]
    if differs:
        raise IncompatibleAdapter(
            ", ".join(differs),
            expected="the base model's, as LORA_PLUGINS_ADAPTER_CHAT=strict",
            remedy="set LORA_PLUGINS_ADAPTER_CHAT=adapter to serve the adapter with its own, or =base without",
        )


def _templates_of(tokenizer: Any) -> dict[str, str]:
    """Return the base model's templates by Transformers' names; empty without a template."""
    own = getattr(tokenizer, "chat_template", None) or {}
    return own if isinstance(own, dict) else {"default": own}


def _end_ids(chat: Chat, tokenizer: Any, vocabulary: int) -> list[int]:
    """Return the ids of an adapter's end tokens, without ids beyond the vocabulary, which are never sampled."""
    text = chat.special_tokens.get("eos_token")
    of_text = None if text is None else tokenizer.get_vocab().get(text)
    return sorted({token for token in (of_text, *chat.end_ids) if token is not None and token < vocabulary})
