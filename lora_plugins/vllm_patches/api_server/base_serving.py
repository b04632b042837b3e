"""vLLM's serving classes: which adapter a request gets, if its key may use one, and its version in the response.

Runs in an API server, for each request. Every serving class picks a request's adapter by
`BaseServing._maybe_get_adapters` and checks the name before by `_check_model` (0.30 to 0.33); both are wrapped. With
an access policy, an adapter that the API key may not use looks like an adapter that does not exist. The name alone
decides, before anything is looked up, so neither the text of an error nor its time shows which adapters exist.

The digest of the version goes into the response's `system_fingerprint`, which four classes have. vLLM fills the field
with a description of the server, in some chunks of a stream only; with `--fingerprint-mode none` vLLM leaves the field
empty for the digest.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from typing import Any

from lora_plugins.adapter.mixture import canonical
from lora_plugins.adapter.names import near
from lora_plugins.api.access.principals import label_of_request, principal_of_request
from lora_plugins.api.http_errors import as_http, http_error
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.lifecycle.registry import no_longer_served
from lora_plugins.lifecycle.response import fingerprint, is_for_request, present
from lora_plugins.log import logger
from lora_plugins.process import Process, this_process
from lora_plugins.store.blocked_names import blocked
from lora_plugins.vllm_patches.api_server.async_llm import is_planned, lora_config_of
from lora_plugins.vllm_patches.message_fields import VERSIONS
from lora_plugins.vllm_patches.wrapping import wrap

# Names of fields in which clients of other servers name an adapter: production-stack, Text Generation Inference, LoRAX,
# SGLang, llama.cpp; `lora_request` is of vLLM's `LLM.generate`.
_FIELD_OF_OTHERS = re.compile(r"(lora|adapter)s?(_?(adapter|name|path|request|(int_?)?id)s?)?", re.IGNORECASE)
# Fields that hold further fields: of Text Generation Inference, of a client's call that was sent as JSON, of Dynamo.
_HOLDERS = ("parameters", "extra_body", "nvext")
_MOST_COMPARED = 1_000  # names: a few milliseconds of the event loop at most


def patch() -> None:
    """Wrap the serving classes of this process; a second call changes nothing."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse, ChatCompletionStreamResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.serve.engine.serving import BaseServing

    wrap(BaseServing, "_maybe_get_adapters", _maybe_get_adapters)
    wrap(BaseServing, "_get_active_default_mm_loras", _get_active_default_mm_loras)
    for serving in (BaseServing, PoolingBaseServing):
        wrap(serving, "_check_model", _check_model)
    for response in (
        ChatCompletionResponse,
        ChatCompletionStreamResponse,
        CompletionResponse,
        CompletionStreamResponse,
    ):
        wrap(response, "__init__", _init_response)


def may_use(name: str) -> bool:
    """Return whether the present request may use an adapter; without a principal, the policy's default decides."""
    policy = this_process().policy
    return policy is None or (principal_of_request.get() or policy.default).may_use(name)


def near_names(models: Any, lora_name: str) -> list[str]:
    """Return names like a misspelt name that are served or listed, and that the present request may use."""
    process = this_process()
    known = itertools.islice(itertools.chain(models.lora_requests, process.listed_names.at_hand()), _MOST_COMPARED)
    found = near(lora_name, {name for name in known if "@" not in name and may_use(name)})  # `@`: a version of a name
    blocked = process.resolver.store.blocks.among(found) if found else ()
    return [name for name in found if name not in blocked]


def _maybe_get_adapters(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Pick the request's adapter as vLLM does, unless the policy or a block forbids the adapter.

    A streamed response for an adapter begins when the engine has begun to answer. A name that was unloaded after vLLM's
    first look gets a 503, not vLLM's 404. A blocked name gets a 404, even if vLLM's table has it.

    Why: vLLM sends status 200 before it knows whether the adapter can be loaded, and looks a name up twice, between
        which it may be unloaded.
    Until: vLLM begins a streamed response with the engine's first output.
    """
    from vllm.exceptions import VLLMNotFoundError

    try:
        adapter = original(_as_if_absent(self, request), request, *args, **kwargs)
    except VLLMNotFoundError:
        _refuse_unloaded(self, request)
        raise
    process = this_process()
    _refuse_unread_fields(process, request, adapter)
    if adapter is not None and not may_use(adapter.lora_name):
        adapter = None  # a default adapter (`image`), which the request did not name: the base model answers
    if adapter is not None:
        with as_http():  # another server of the store blocked the name, or its unload waits
            process.resolver.store.blocks.refuse(adapter.lora_name)
    _note_version(process, self, adapter)
    # A stream's status goes out with its headers: an error after them could only be text in a 200.
    if adapter is not None and process.is_manager_patched and getattr(request, "stream", False):
        present().is_held = True
    return adapter


def default_adapters(models: Any) -> dict[str, str]:
    """Return the adapters of `--default-mm-loras`: a path for each type of content parts, which is the name too."""
    return getattr(lora_config_of(models.engine_client), "default_mm_loras", None) or {}


def _get_active_default_mm_loras(original: Any, self: Any, request: Any) -> Any:
    """Choose a default adapter among the declared ones; vLLM chooses among all that are served.

    Touches:
        vllm.config.lora: LoRAConfig{default_mm_loras}
    Why: an adapter named `text` or `image`, whoever made the server load it, would answer the base model's chats that
        have parts of this type; beside a declared adapter, it would keep that one from answering.
    Until: vLLM chooses among the adapters of --default-mm-loras.
    """
    declared, served = default_adapters(self.models), self.models.lora_requests
    return original(_over(self, {name: served[name] for name in declared if name in served}), request)


async def _check_model(original: Any, self: Any, request: Any) -> Any:
    """Check a name as vLLM does, without adapters that the key may not use; raise for unknown names of pooling too.

    vLLM's own check of pooling lets every name pass. After ours, a name that `_maybe_get_adapters` does not find was
    unloaded meanwhile.

    Touches:
        vllm.entrypoints.serve.engine.serving:
            BaseServing{models, _is_model_supported(self, model_name),
                _maybe_get_adapters(self, request, supports_default_mm_loras)}
        vllm.entrypoints.openai.models.serving: OpenAIServingModels.is_base_model(self, model_name)
    Why: an adapter that the key may not use must look like one that does not exist. Default multimodal adapters come
        from _maybe_get_adapters; so would pooling's unknown names, beside those that were just unloaded.
    Until: vLLM asks a plugin which adapters a request may use.
    """
    from vllm.exceptions import VLLMNotFoundError

    serving = _as_if_absent(self, request)
    # Twice: an unload may take a name from the table before the request that has resolved the name goes on.
    for _ in range(2):
        error = await original(serving, request)
        # A name that vLLM has resolved just now has no error either, and is in the table by now.
        is_there = serving._is_model_supported(request.model) or request.model in serving.models.lora_requests  # noqa: SLF001
        if error is not None or is_there:
            return error
    raise VLLMNotFoundError(f"The model `{request.model}` does not exist.")  # as `_maybe_get_adapters` has it


def _as_if_absent(serving: Any, request: Any) -> Any:
    """Return `serving`, or a copy without adapters and resolvers where the request may not use its adapter.

    vLLM's own code then answers "no such model", in vLLM's words. A mixture gets its canonical name, which is served.
    """
    # Without a name, vLLM answers with the base model.
    name = canonical(request.model or "")
    if not name or may_use(name) or serving.models.is_base_model(name):
        request.model = name or request.model
        return serving
    logger.debug("%s may not use adapter %r", label_of_request(), name)
    bare = _over(serving, {})
    bare.models.resolve_lora = _resolve_nothing
    return bare


def _over(serving: Any, adapters: dict[str, Any]) -> Any:
    """Return a shallow copy of `serving` with these adapters, for one call: other requests keep the table itself."""
    taken = copy.copy(serving)
    taken.models = copy.copy(serving.models)
    taken.models.lora_requests = adapters
    return taken


async def _resolve_nothing(_: str) -> None:
    return None


def _refuse_unloaded(serving: Any, request: Any) -> None:
    """Raise "ask once more" for a name that vLLM has checked, and that was unloaded before vLLM's second look.

    Calls outside of a request have checked nothing: vLLM's own error stands.
    """
    if not (is_for_request() and is_planned(serving.models.engine_client)):
        return
    name = request.model
    # Callers without the right must not learn that the name is blocked.
    is_blocked = may_use(name) and name in this_process().resolver.store.blocks
    raise http_error((blocked if is_blocked else no_longer_served)(name)) from None


def _refuse_unread_fields(process: Process, request: Any, adapter: Any) -> None:
    """Refuse a request for the base model with an adapter in a field of other servers, which vLLM does not read.

    vLLM's own fields are never among `model_extra`.
    """
    if adapter is None and process.settings.adapter_fields == "refuse":
        given = getattr(request, "model_extra", None) or {}
        for prefix, held in (("", given), *((f"{name}.", given.get(name)) for name in _HOLDERS)):
            for name, value in held.items() if isinstance(held, dict) else ():
                if value and value != request.model and _FIELD_OF_OTHERS.fullmatch(name):
                    raise http_error(_unread(prefix + name, value)) from None


def _unread(field: str, value: Any) -> IncompatibleAdapter:
    shown = json.dumps(value, ensure_ascii=False, default=str)[:200]
    name = value[0] if isinstance(value, list) else value
    if isinstance(name, dict):
        name = name.get("lora_name") or name.get("name") or name.get("id")
    send = f'"model": "{name[:200]}"' if isinstance(name, str) else 'the adapter\'s name as the "model"'
    return IncompatibleAdapter(
        f'"{field}": {shown}, which vLLM does not read: the base model would answer',
        expected="the adapter's name as the model",
        remedy=f"send {send}, or set LORA_PLUGINS_ADAPTER_FIELDS=ignore",
    )


def _note_version(process: Process, serving: Any, adapter: Any) -> None:
    """Note for the response the digest in the path of a version in the store; other adapters have no known digest."""
    digest = None if adapter is None else process.resolver.store.layout.digest_of(adapter.lora_path)
    warnings = () if digest is None else process.resolver.known.warnings_of(digest)
    # The attribute is None with `--fingerprint-mode none`: the field is free for the digest. Classes without the
    # attribute (pooling) have no such field.
    fills = getattr(serving, "system_fingerprint", "") is None
    present().note_version(digest, warnings=warnings, fills_fingerprint=fills)


def _init_response(original: Any, self: Any, **fields: Any) -> None:
    """Set the fields in every chunk; vLLM leaves out fields that it has not set.

    Where the serving class has no fingerprint (`--fingerprint-mode none`), the field has the digest that
    `_maybe_get_adapters` has noted. The response of a moved request has its versions in `kv_transfer_params`, also
    in chunks of a stream, whose classes do not define the field.

    Touches:
        vllm.lora.request: LoRARequest{lora_path}
        vllm.entrypoints.generate.base.serving: GenerateBaseServing{system_fingerprint}
        vllm.entrypoints.openai.chat_completion.protocol: ChatCompletionResponse{system_fingerprint}
            ChatCompletionStreamResponse{system_fingerprint}
        vllm.entrypoints.openai.completion.protocol: CompletionResponse{system_fingerprint}
            CompletionStreamResponse{system_fingerprint}
    Why: an answer must say which version made it: the name stands for another one after a swap. Clients that keep
        bodies and no headers can tell versions apart too, in every chunk of a stream.
    Until: vLLM's fingerprint changes with the adapter's version.
    """
    if fields.get("system_fingerprint") is None and (digest := fingerprint()) is not None:
        fields["system_fingerprint"] = digest
    of_connector = {name: it for name, it in (fields.get("kv_transfer_params") or {}).items() if name != VERSIONS}
    if of_connector:  # a proxy passes the connector's parameters to another engine as they are, so without versions
        fields["kv_transfer_params"] = of_connector
    elif (response := present()).has_moved:
        fields["kv_transfer_params"] = {VERSIONS: response.spans}
    original(self, **fields)
