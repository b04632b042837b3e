"""A request whose logits are not numbers ends with an error; the second one of a version has it served no more.

Workers count NaN in logits where `VLLM_COMPUTE_NANS_IN_LOGITS` is set (`ModelRunnerOutput.num_nans_in_logits` in
vllm/v1/outputs.py, 0.30 to 0.33), on the device, beside the sampling. A pooled output is looked at here. What such a
request has computed leaves the prefix cache; nobody else reads it (`worker/model_runner.py`). Requests for the base
model are left alone, and so are all with speculative decoding, where vLLM counts by rows that are no requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cachetools import LRUCache

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.vllm_patches.engine_core.held_counts import HeldCounts
from lora_plugins.vllm_patches.engine_core.request import name_of

_MOST = 2
_REMEMBERED = 10_000


class FiniteAnswers(HeldCounts):
    """Of a scheduler class of vLLM's that follows in a subclass."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._ended_by_version: LRUCache[str, int] = LRUCache(_REMEMBERED)
        self._rows_are_requests = vllm_config.speculative_config is None
        super().__init__(vllm_config, *args, **kwargs)

    def end_without_numbers(self, computed: Any) -> list[tuple[Any, LoRAPluginsError]]:
        """End the requests of adapters for which the workers have computed no numbers, before vLLM takes these.

        Returns the requests, with the errors that they are to be answered with.
        """
        from vllm.v1.request import RequestStatus

        ended: list[tuple[Any, LoRAPluginsError]] = []
        for name in list(_without_numbers(computed)) if self._rows_are_requests else ():
            request = self.requests.get(name)  # type: ignore[attr-defined]
            if request is None or request.lora_request is None or request.is_finished():
                continue
            version = name_of(request.lora_request.lora_path)
            self._ended_by_version[version] = self._ended_by_version.get(version, 0) + 1
            cache = self.kv_cache_manager  # type: ignore[attr-defined]
            blocks = {block for of_group in cache.get_block_ids(name) for block in of_group}
            self.finish_requests(name, RequestStatus.FINISHED_ERROR)  # type: ignore[attr-defined]
            cache.evict_blocks(blocks)
            ended.append((request, _no_numbers(request.lora_request.lora_name, "an answer")))
        return ended

    def why_quarantined(self, lora_request: Any) -> LoRAPluginsError | None:
        """Why requests are not answered with these weights any more; None where they are."""
        ended = self._ended_by_version.get(name_of(lora_request.lora_path), 0)
        return _no_numbers(lora_request.lora_name, f"{ended} answers") if ended >= _MOST else None


def _without_numbers(computed: Any) -> Iterator[str]:
    for name, count in (computed.num_nans_in_logits or {}).items():
        if count:
            yield name
    for name, index in computed.req_id_to_index.items() if computed.pooler_output else ():
        pooled = computed.pooler_output[index]
        if pooled is not None and pooled.is_floating_point() and bool(pooled.isnan().any()):
            yield name


def _no_numbers(adapter: str, answers: str) -> InvalidAdapter:
    return InvalidAdapter(
        f"{answers} with NaN in the logits",
        expected="numbers that the served dtype can hold",
        remedy="correct lora_alpha or train it again, and load it as a new version",
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
        vllm.v1.request:
            RequestStatus{FINISHED_ERROR}
        """,
        what="a request of an adapter with NaN is finished before vLLM takes the step's output, and its blocks leave "
        "the prefix cache",
        why="its tokens would be those of no weights",
        remove="vLLM ends requests whose logits are NaN",
    ),
)
