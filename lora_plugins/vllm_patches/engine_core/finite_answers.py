"""A request whose logits are not finite ends with an error; two in a row quarantine the adapter's version for a while.

The scheduler of an engine core asks with each step's `ModelRunnerOutput`, before vLLM takes the output. Workers count
NaN in logits where `VLLM_COMPUTE_NANS_IN_LOGITS` is set (`num_nans_in_logits` in vllm/v1/outputs.py, 0.30 to 0.33), on
the device, beside the sampling; pooled outputs are checked here. The blocks that such a request computed leave the
prefix cache; nobody else reads them (`worker/model_runner.py`). Requests for the base model are left alone, and so are
all requests with speculative decoding, where vLLM counts by rows, not by requests.

NaN counts against the version only where the request brings no numbers of its own: embeddings or pictures of a client
may hold NaN, or overflow the base model. A finite answer in between shows that the version computes.

Touches:
    vllm.v1.outputs: ModelRunnerOutput{num_nans_in_logits, pooler_output, req_id_to_index}
    vllm.v1.engine: FinishReason{STOP, LENGTH}
    vllm.v1.request: Request{mm_features, prompt_embeds} RequestStatus{FINISHED_ERROR}
Why: the request's tokens would be those of no weights.
Until: vLLM ends requests whose logits are NaN.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.vllm_patches.engine_core.request import is_in_store

_MOST_IN_A_ROW = 2
_REMEMBERED = 10_000
QUARANTINE_S = 300.0


class FiniteAnswers:
    """The versions of one engine that answered with NaN lately.

    Args:
        adapters: the planner's, by id of request.
        rows_are_requests: whether workers count NaN by request.
    """

    def __init__(self, adapters: Mapping[str, Adapter], *, rows_are_requests: bool) -> None:
        self._adapters = adapters
        self._rows_are_requests = rows_are_requests
        # By `_version`: answers with NaN, without a finite answer between them, and when the last answer ended.
        self._with_nan: LRUCache[str | tuple[str, int], tuple[int, float]] = LRUCache(_REMEMBERED)

    def without_numbers(self, requests: Mapping[str, Any], computed: Any) -> list[Any]:
        """The unfinished requests of adapters with NaN in a `ModelRunnerOutput`; each counts against its version."""
        if not self._rows_are_requests:
            return []
        counts, pooled, found = computed.num_nans_in_logits or {}, computed.pooler_output, []
        suspects = [name for name, count in counts.items() if count]
        suspects += computed.req_id_to_index if pooled else ()
        for name in dict.fromkeys(suspects):  # a request with both kinds of NaN counts once
            request = requests.get(name)
            if request is None or request.lora_request is None or request.is_finished():
                continue
            if counts.get(name) or _has_nan(pooled[computed.req_id_to_index[name]]):
                found.append(request)
                self._count(request)
        return found

    def _count(self, request: Any) -> None:
        """Count an answer with NaN against its version, unless the client's own numbers may be the cause."""
        adapter = self._adapters.get(request.request_id)
        if adapter is not None and not _brings_numbers(request):
            version = _version(adapter)
            self._with_nan[version] = self._with_nan.get(version, (0, 0.0))[0] + 1, time.monotonic()

    def is_whole(self, request_id: str) -> None:
        """Forget earlier NaN of the version that has answered a request whole.

        An aborted request proves nothing: the client left before the answer was whole.
        """
        if self._with_nan and (adapter := self._adapters.get(request_id)) is not None:
            self._with_nan.pop(_version(adapter), None)

    def why_quarantined(self, adapter: Adapter) -> LoRAPluginsError | None:
        """Return the error for requests of a version that has answered with NaN in a row, or None.

        After `QUARANTINE_S` the version answers again, until the next NaN.
        """
        in_a_row, last_at = self._with_nan.get(_version(adapter), (0, 0.0))
        # The count stays after the quarantine, so that the next NaN begins another quarantine at once.
        left_s = last_at + QUARANTINE_S - time.monotonic()
        if in_a_row < _MOST_IN_A_ROW or left_s <= 0:
            return None
        return no_numbers(adapter.spec.name, f"{in_a_row} answers in a row", f", or ask again in {left_s:.0f} s")


def _brings_numbers(request: Any) -> bool:
    """Whether a client's own embeddings or pictures are in the prompt."""
    return request.prompt_embeds is not None or bool(request.mm_features)


def _version(adapter: Adapter) -> str | tuple[str, int]:
    """Return the identity of an adapter's weights: the store's digest, or one load from another path."""
    path = adapter.spec.path
    return path if is_in_store(path) else (path, adapter.weights_key)


def _has_nan(pooled: Any) -> bool:
    # A sum without NaN proves cheaply that no value is NaN; the sum of infinities of both signs is NaN too.
    return bool(pooled is not None and pooled.is_floating_point() and pooled.sum().isnan() and pooled.isnan().any())


def no_numbers(adapter: str, answers: str, retry: str = "") -> InvalidAdapter:
    return InvalidAdapter(
        f"{answers} with NaN or infinity in the logits",
        expected="numbers that the served dtype can hold",
        remedy=f"correct lora_alpha or train it again, and load it as a new version{retry}",
        adapter=adapter,
    )
