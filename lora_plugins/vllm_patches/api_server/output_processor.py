"""vLLM's outputs of a request name the versions of the answer, however the request ends.

The scheduler names versions in the outputs of a moved request (`engine_core/request.py`). vLLM passes on one output's
names: of several choices the last choice's, of a whole answer the end's. An abort's end has no names.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.ledger import Patch
from lora_plugins.server.response import together
from lora_plugins.vllm_patches.answer_messages import VERSIONS
from lora_plugins.vllm_patches.wrapping import wrap

_SPANS = "lora_plugins_spans"  # an attribute of the request's state, or of the state that several choices share


def patch() -> None:
    """Have every client of this process name versions; a second call changes nothing."""
    from vllm.v1.engine.output_processor import RequestState

    wrap(RequestState, "make_request_output", _saying_versions)


def _saying_versions(original: Any) -> Any:
    def make_request_output(  # noqa: PLR0917 - as vLLM has it
        self: Any,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        whole, said = self.parent_req or self, (kv_transfer_params or {}).get(VERSIONS, ())
        # Each output gets all spans so far: vLLM may pass on any output as the last.
        if spans := together(getattr(whole, _SPANS, ()), said):
            setattr(whole, _SPANS, spans)
            kv_transfer_params = (kv_transfer_params or {}) | {VERSIONS: spans}
        return original(
            self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, *args, **kwargs
        )

    return make_request_output


LEDGER = (
    Patch(
        """
        vllm.v1.engine.output_processor:
            RequestState{parent_req}
            RequestState.make_request_output(
                self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, ...)
        """,
        what="wrapped: lora_versions, once said, stand in the kv_transfer_params of every later output",
        why="vLLM makes the output of an aborted request itself, without any; a trainer must know what made its tokens",
        remove="vLLM's outputs have a field for the versions of an adapter",
    ),
)
