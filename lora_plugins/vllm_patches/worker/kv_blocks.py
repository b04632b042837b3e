"""New KV blocks are zeroed before they are used, as vLLM does where a model has Mamba layers.

A block is filled token by token, and attention reads all of it: what lies behind the last token has weight 0. After an
adapter whose keys or values overflowed that is 0 * NaN, which is NaN for whoever has the block next, the base model's
requests too. `KVCacheConfig.needs_kv_cache_zeroing` (vllm/v1/kv_cache_interface.py, 0.30 to 0.33) says whether the
scheduler names new blocks and workers zero them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from lora_plugins.ledger import Patch

_OURS = "_lora_plugins_all_groups"


def patch() -> None:
    """Have every engine and worker of this process do so."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)


def patch_runner() -> None:
    """The same on the CPU, in a worker's process; its runner leaves out groups of sliding windows."""
    runners = sys.modules.get("vllm.v1.worker.cpu_model_runner")
    if runners is None:
        return
    original = runners.CPUModelRunner._zero_block_ids  # noqa: SLF001
    if not hasattr(original, _OURS):
        runners.CPUModelRunner._zero_block_ids = _zeroing(original)  # noqa: SLF001


def _zeroing(original: Any) -> Any:
    @functools.wraps(original)
    def zero_block_ids(self: Any, block_ids: list[int]) -> None:
        from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

        original(self, block_ids)
        layers = self.compilation_config.static_forward_context
        for group in self.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            if isinstance(spec, FullAttentionSpec) or not isinstance(spec, AttentionSpec):
                continue
            for name in group.layer_names:
                blocks: Any = getattr(layers.get(name), "kv_cache", None)
                if hasattr(blocks, "index_fill_"):  # a tensor
                    blocks[block_ids] = 0

    setattr(zero_block_ids, _OURS, True)
    return zero_block_ids


LEDGER = (
    Patch(
        """
        vllm.v1.kv_cache_interface:
            KVCacheConfig.needs_kv_cache_zeroing
            AttentionSpec
            FullAttentionSpec
        vllm.v1.worker.cpu_model_runner:
            CPUModelRunner._zero_block_ids(self, block_ids)
        """,
        what="always true, so that workers zero each KV block before a request has it; on the CPU sliding windows too",
        why="0 * NaN: an adapter whose values overflow would reach whoever gets its blocks",
        remove="vLLM zeroes blocks, or its kernels do not read behind the last token",
    ),
)
