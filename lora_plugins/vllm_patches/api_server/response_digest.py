"""vLLM's answers say which version of an adapter computed them.

Wrapped are `BaseServing._maybe_get_adapters`, by which every serving class of vLLM gives a request its adapter (0.30 to
0.33), and the four kinds of response that have a `system_fingerprint`. vLLM writes there what describes the server, in
some chunks of a stream only; where it is started with `--fingerprint-mode none` it writes nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from lora_plugins.ledger import Patch
from lora_plugins.process import Process
from lora_plugins.server.response_digest import SayDigest, fingerprint, note_version


def patch(process: Process) -> None:
    """Have the API servers of this process do so; to be called before they are made."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse, ChatCompletionStreamResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.entrypoints.serve.instrumentator import metrics

    BaseServing._maybe_get_adapters = _noting(BaseServing._maybe_get_adapters, process)  # noqa: SLF001 - in the ledger
    for response in (
        ChatCompletionResponse,
        ChatCompletionStreamResponse,
        CompletionResponse,
        CompletionStreamResponse,
    ):
        response.__init__ = _filling(response.__init__)
    metrics.attach_router = _with_middleware(metrics.attach_router)


def _noting(original: Any, process: Process) -> Any:
    """The path of a version in the store says its digest; of an adapter that lies elsewhere none is known."""

    @functools.wraps(original)
    def _maybe_get_adapters(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, request, *args, **kwargs)
        digest = None if found is None else process.resolver.store.layout.digest_of(found.lora_path)
        note_version(digest, fills_fingerprint=getattr(self, "system_fingerprint", "") is None)
        return found

    return _maybe_get_adapters


def _filling(original: Any) -> Any:
    """What is set here is written in every chunk; vLLM leaves out what it has not set."""

    @functools.wraps(original)
    def made(self: Any, **fields: Any) -> None:
        if fields.get("system_fingerprint") is None and (said := fingerprint()) is not None:
            fields["system_fingerprint"] = said
        original(self, **fields)

    return made


def _with_middleware(original: Any) -> Any:
    @functools.wraps(original)
    def attach_router(app: Any) -> None:
        original(app)
        app.add_middleware(SayDigest)

    return attach_router


LEDGER = (
    Patch(
        """
        vllm.entrypoints.serve.engine.serving:
            BaseServing._maybe_get_adapters(self, request, supports_default_mm_loras)
        vllm.lora.request:
            LoRARequest{lora_path}
        vllm.entrypoints.serve.instrumentator.metrics:
            attach_router(app)
        """,
        what="wrapped: the version that a request is given is noted; attach_router adds the middleware that says it in "
        "x-lora-digest",
        why="an answer must say which version made it: the name stands for another one after a swap",
        remove="vLLM says in its answers which adapter, by its path or digest, computed them",
    ),
    Patch(
        """
        vllm.entrypoints.generate.base.serving:
            GenerateBaseServing{system_fingerprint}
        vllm.entrypoints.openai.chat_completion.protocol:
            ChatCompletionResponse{system_fingerprint}
            ChatCompletionStreamResponse{system_fingerprint}
        vllm.entrypoints.openai.completion.protocol:
            CompletionResponse{system_fingerprint}
            CompletionStreamResponse{system_fingerprint}
        """,
        what="the responses' __init__ is wrapped: where the serving class has none (--fingerprint-mode none), "
        "they have the digest",
        why="clients that keep bodies and no headers can tell versions apart too, in every chunk of a stream",
        remove="vLLM's fingerprint changes with the adapter's version",
    ),
)
