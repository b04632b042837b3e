"""vLLM's requests to the engine say which client's request each is a part of: a beam, a choice, a prompt of several.

The engine core would have to read the fact from the id of a request, and clients choose ids (`X-Request-Id`).
`EngineCoreRequest.trace_headers` carries the name to the engine core, whose scheduler takes the name out again.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.server.response import is_for_request, present
from lora_plugins.vllm_patches.engine_core.request import CLIENT
from lora_plugins.vllm_patches.wrapping import wrap


def patch() -> None:
    """Have every request of this process to an engine name its client's request, where there is one."""
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "assign_request_id", _naming)


def _naming(original: Any) -> Any:
    """Give each request for an adapter a header of ours, before vLLM divides the request into choices.

    Touches: vllm.v1.engine: EngineCoreRequest{trace_headers, lora_request}
    Why: parts of one client's request run together, and a pause waits for the parts; ids are chosen by clients.
    Until: vLLM's engine core learns which requests are parts of one.
    """

    def assign_request_id(request: Any) -> None:
        original(request)
        if request.lora_request is not None and is_for_request():
            request.trace_headers = {**(request.trace_headers or {}), CLIENT: present().client}

    return assign_request_id
