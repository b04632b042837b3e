"""The keys of offloaded blocks follow a request to the weights that compute the rest of its prompt.

vLLM's OffloadingConnector notes the keys of a request once, with its first batch, and only ever adds to them
(`RequestOffloadState.update_offload_keys`, 0.30 to 0.33). A request that moves gets other keys for what is not computed
yet (`request.py`): under the first keys other requests would load what other weights have computed.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.vllm_patches.wrapping import wrap


def patch() -> None:
    """Have every OffloadingConnector of this process forget keys that its request no longer has."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState

    wrap(RequestOffloadState, "update_offload_keys", _following)


def _following(original: Any) -> Any:
    """Forget keys that are no longer the request's before vLLM adds the request's keys.

    Touches:
        vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:
            RequestOffloadState{config, req, group_states}
            RequestGroupState{offload_keys}
            GroupOffloadConfig{hashes_per_chunk}
        vllm.v1.kv_offload.base: get_offload_block_hash(key)
    Why: blocks that a new version has computed would be stored under the keys of the version before.
    Until: vLLM's connector reads the keys of a request when it stores its blocks.
    """

    def update_offload_keys(self: Any) -> None:
        from vllm.v1.kv_offload.base import get_offload_block_hash

        for group, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
            keys, every = state.offload_keys, group.hashes_per_chunk
            # A block's hash holds those before it: all agree where the last does.
            while keys and get_offload_block_hash(keys[-1]) not in self.req.block_hashes[len(keys) * every - 1 :][:1]:
                keys.pop()
        original(self)

    return update_offload_keys
