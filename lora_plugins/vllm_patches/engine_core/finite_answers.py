"""A request whose logits are not finite numbers ends with an error; two in a row quarantine the version for a while.

Workers count NaN in logits where `VLLM_COMPUTE_NANS_IN_LOGITS` is set (`ModelRunnerOutput.num_nans_in_logits` in
vllm/v1/outputs.py, 0.30 to 0.33), on the device, beside the sampling. A pooled output is looked at here. What such a
request has computed leaves the prefix cache; nobody else reads it (`worker/model_runner.py`). Requests for the base
model are left alone, and so are all with speculative decoding, where vLLM counts by rows that are no requests.

NaN says something of the version only where the request brings no numbers of its own: embeddings or pictures of a
client may hold NaN, or overflow the base model. A finite answer in between shows that the version computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.vllm_patches.engine_core.held_counts import HeldCounts
from lora_plugins.vllm_patches.engine_core.request import is_in_store

_MOST = 2
_REMEMBERED = 10_000
QUARANTINE_S = 300.0


@dataclass
class _InARow:
    """Answers of one version that had NaN, without a finite one since, and when the last of them ended."""

    count: int = 0
    last_at: float = 0.0


class FiniteAnswers(HeldCounts):
    """Of a scheduler class of vLLM's that follows in a subclass."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._with_nan: LRUCache[str | tuple[str, int], _InARow] = LRUCache(_REMEMBERED)  # by what `_version` says
        self._rows_are_requests = vllm_config.speculative_config is None
        super().__init__(vllm_config, *args, **kwargs)

    def end_without_numbers(self, computed: Any) -> list[tuple[Any, LoRAPluginsError]]:
        """End the requests of adapters for which the workers have computed no numbers, before vLLM takes these.

        Returns the requests, with the errors that they are to be answered with.
        """
        from vllm.v1.request import RequestStatus

        ended: list[tuple[Any, LoRAPluginsError]] = []
        for request in list(self._without_numbers(computed)) if self._rows_are_requests else ():
            name = request.request_id
            adapter = self.planner.state.of_request.get(name)  # type: ignore[union-attr]
            if adapter is not None and not _brings_numbers(request):
                in_a_row = self._with_nan.setdefault(_version(adapter), _InARow())
                in_a_row.count, in_a_row.last_at = in_a_row.count + 1, time.monotonic()
            cache = self.kv_cache_manager  # type: ignore[attr-defined]
            blocks = {block for of_group in cache.get_block_ids(name) for block in of_group}
            self.finish_requests(name, RequestStatus.FINISHED_ERROR)  # type: ignore[attr-defined]
            cache.evict_blocks(blocks)
            ended.append((request, _no_numbers(request.lora_request.lora_name, "an answer")))
        return ended

    def _without_numbers(self, computed: Any) -> Iterator[Any]:
        """The unfinished requests of adapters among what is computed that have NaN."""
        for name, count in (computed.num_nans_in_logits or {}).items():
            if count and (request := self._of_adapter(name)) is not None:
                yield request
        for name, index in computed.req_id_to_index.items() if computed.pooler_output else ():
            pooled = computed.pooler_output[index]
            if pooled is not None and (request := self._of_adapter(name)) is not None and _has_nan(pooled):
                yield request

    def _of_adapter(self, name: str) -> Any:
        request = self.requests.get(name)  # type: ignore[attr-defined]
        return None if request is None or request.lora_request is None or request.is_finished() else request

    def has_ended(self, output: Any) -> None:
        """Forget earlier NaN of a version that has answered a request whole."""
        if not self._with_nan:
            return
        from vllm.v1.engine import FinishReason

        adapter = self.planner.state.of_request.get(output.request_id)  # type: ignore[union-attr]
        if adapter is not None and output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._with_nan.pop(_version(adapter), None)

    def why_quarantined(self, adapter: Adapter) -> LoRAPluginsError | None:
        """Why requests are not answered with this generation now; None where they are.

        After `QUARANTINE_S` requests are answered again, until the next one with NaN.
        """
        in_a_row = self._with_nan.get(_version(adapter))
        if in_a_row is None or in_a_row.count < _MOST:
            return None
        left_s = in_a_row.last_at + QUARANTINE_S - time.monotonic()
        if left_s <= 0:
            return None
        return _no_numbers(adapter.spec.name, f"{in_a_row.count} answers in a row", f", or ask again in {left_s:.0f} s")


def _brings_numbers(request: Any) -> bool:
    """Whether a client's own embeddings or pictures are in the prompt."""
    return request.prompt_embeds is not None or bool(request.mm_features)


def _version(adapter: Adapter) -> str | tuple[str, int]:
    """Which weights an adapter has: the bytes of the store's digest, or what one load has read from another path."""
    path = adapter.spec.path
    return path if is_in_store(path) else (path, adapter.weights)


def _has_nan(pooled: Any) -> bool:
    """Whether there is NaN in what is pooled; a sum without NaN is the cheap proof that there is none."""
    return bool(pooled.is_floating_point() and pooled.sum().isnan() and pooled.isnan().any())


def _no_numbers(adapter: str, answers: str, retry: str = "") -> InvalidAdapter:
    return InvalidAdapter(
        f"{answers} with NaN or infinity in the logits",
        expected="numbers that the served dtype can hold",
        remedy=f"correct lora_alpha or train it again, and load it as a new version{retry}",
        adapter=adapter,
    )


LEDGER = (
    Patch(
        """
        vllm.v1.outputs:
            ModelRunnerOutput{num_nans_in_logits, pooler_output, req_id_to_index}
        vllm.v1.core.sched.scheduler:
            Scheduler{kv_cache_manager}
        vllm.v1.core.kv_cache_manager:
            KVCacheManager.get_block_ids(self, request_id)
            KVCacheManager.evict_blocks(self, block_ids)
        vllm.v1.engine:
            FinishReason{STOP, LENGTH}
        vllm.v1.request:
            Request{mm_features, prompt_embeds}
            RequestStatus{FINISHED_ERROR}
        """,
        what="a request of an adapter with NaN is finished before vLLM takes the step's output, and its blocks leave "
        "the prefix cache",
        why="its tokens would be those of no weights",
        remove="vLLM ends requests whose logits are NaN",
    ),
)
