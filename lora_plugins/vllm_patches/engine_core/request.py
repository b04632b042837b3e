"""What the engine core changes in a request of vLLM's: the weights that compute it, and the keys of its KV blocks.

The scheduler calls these functions as a request arrives, moves to another version, or ends. vLLM's `Request`
(vllm/v1/request.py, 0.30 to 0.33) is given a `LoRARequest` of its adapter's generation (`scheduler/state.py` has the
words): batches find the slot by the id of the `LoRARequest`, and cached prefixes and offloaded blocks have its path in
their keys, so no other weights' blocks are found. Where the path changes, the hashes of blocks that are not computed
yet are made again.

A request that moves in the middle of its answer gets a path of its own, so that no other request finds blocks that mix
two versions.

Touches:
    vllm.v1.request:
        Request{lora_request, block_hashes, num_computed_tokens, num_output_placeholders, num_preemptions, status,
            trace_headers, num_output_tokens(self), update_block_hashes(self)}
        RequestStatus{WAITING, PREEMPTED}
Why: batches find slots, and cached prefixes their weights, by vLLM's id and path, which callers give again.
Until: vLLM's keys of cached prefixes hold the identity of an adapter's bytes (vllm-project/vllm#48352).
"""

from __future__ import annotations

import os
import re
from typing import Any

from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.store.layout import is_digest
from lora_plugins.vllm_patches.wrapping import wrap
from lora_plugins.worker.request_types import lora_request

CLIENT = "x-lora-plugins-client"  # the header with the name of the client's request that a request is a part of

_BEAM = re.compile(r".+-[0-9a-f]{16}-beam-\d+(-[0-9a-f]{8})?")  # vllm/entrypoints/generate/beam_search/online.py
_OF_ONE = "#request="  # in the path of a moved request, before its id: only this request has the path


def is_in_store(path: str) -> bool:
    """Return whether a path is named by the digest of its contents, which therefore never change."""
    return is_digest(os.path.basename(path))


def name_of(path: str) -> str:
    """Return the name that answers give to the weights at a path: the digest for a path in the store, else the path."""
    return os.path.basename(path) if is_in_store(path) else path


def weights_of(adapter: Adapter) -> str:
    """Return the name that answers give to an adapter's present weights."""
    return name_of(path_of(adapter))


def weights_path(request: Any) -> str:
    """Return the path of the weights that a request is computed with, whether or not the request has moved."""
    return str(request.lora_request.lora_path.removesuffix(_OF_ONE + request.request_id))


def is_moved(request: Any) -> bool:
    """Return whether a request has gone on with other weights than it began with: no other request has its keys."""
    return bool(request.lora_request is not None and request.lora_request.lora_path != weights_path(request))


def assign(request: Any, adapter: Adapter) -> None:
    """Have a request that has not begun be computed with this generation."""
    # vLLM's id of the adapter, for the engine, is the key of the generation.
    before, path = request.lora_request, path_of(adapter)
    if (before.lora_int_id, weights_path(request)) == (adapter.key, path):
        return
    request.lora_request = lora_request(adapter.spec.name, adapter.key, path)
    # vLLM hashes a request's prompt on arrival (`Request.__init__`): the keys must follow the path.
    if before.lora_path != path:
        request.block_hashes.clear()
        request.update_block_hashes()


def move(request: Any, adapter: Adapter, hash_block_size: int) -> None:
    """Have a running request go on with its adapter's present weights.

    Tokens computed with earlier weights keep their keys; no other request finds the keys of later tokens.
    """
    path = path_of(adapter) + _OF_ONE + request.request_id
    request.lora_request = lora_request(adapter.spec.name, adapter.key, path)
    hash_again(request, hash_block_size)


def hash_again(request: Any, hash_block_size: int) -> None:
    """Give the blocks that are not computed yet the keys of the request's present path."""
    # Only whole blocks have keys. The block that mixes tokens of both weights gets a key of this request alone
    # (`request_block_hasher` in vllm/v1/core/kv_cache_utils.py, 0.32).
    del request.block_hashes[request.num_computed_tokens // hash_block_size :]
    request.update_block_hashes()


def has_begun(request: Any) -> bool:
    """Return whether tokens of a request have been computed: preempted requests too, and sessions between parts."""
    return bool(request.num_computed_tokens or request.num_preemptions or request.num_output_tokens)


def has_kv_cache(request: Any) -> bool:
    """Return whether a request waits with blocks of the KV cache that nobody fills at the moment."""
    from vllm.v1.request import RequestStatus

    return bool(request.num_computed_tokens) and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def has_weights(request: Any, spec: AdapterSpec, weights_key: int) -> bool:
    """Return whether a request was computed with the weights of this spec and key of a load (`path_of`)."""
    return weights_path(request) == _path_of(spec, weights_key)


def is_beam(request_id: str) -> bool:
    """Return whether a request computes one token of a client's beams, so that the next tokens' requests come soon."""
    return _BEAM.fullmatch(request_id) is not None


def take_client(request: Any) -> None:
    """Note in `lora_client` which client's request a request is a part of, by the header that API servers add.

    vLLM sends the headers of a request back with each output: the header goes no further.
    """
    headers = dict(request.trace_headers or {})
    request.lora_client = headers.pop(CLIENT, "")
    request.trace_headers = headers or None


def path_of(adapter: Adapter) -> str:
    """Return the path of an adapter's present weights, as keys of blocks have it."""
    return _path_of(adapter.spec, adapter.weights_key)


def _path_of(spec: AdapterSpec, weights: int) -> str:
    """Return a path that no other weights have: outside the store, with the key of the load that read the path."""
    return spec.path if is_in_store(spec.path) else f"{spec.path}#{weights}"


def patch_offloading() -> None:
    """Have every OffloadingConnector of this process forget keys that its request no longer has."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState

    wrap(RequestOffloadState, "update_offload_keys", _update_offload_keys)


def _update_offload_keys(original: Any, self: Any) -> None:
    """Forget keys that are no longer the request's before vLLM adds the request's keys.

    vLLM notes the keys of a request once, with its first batch, and only ever adds to them (0.30 to 0.33). A request
    that moves gets other keys for what is not computed yet: under the first keys other requests would load what other
    weights have computed.

    Touches:
        vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:
            RequestOffloadState{config, req, group_states}
            RequestGroupState{offload_keys}
            GroupOffloadConfig{hashes_per_chunk}
        vllm.v1.kv_offload.base: get_offload_block_hash(key)
    Why: blocks that a new version has computed would be stored under the keys of the version before.
    Until: vLLM's connector reads the keys of a request when it stores its blocks.
    """
    from vllm.v1.kv_offload.base import get_offload_block_hash

    for group, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
        keys, every = state.offload_keys, group.hashes_per_chunk
        # A key is made of the hash of its chunk's last block, which depends on all blocks before: if the last key
        # agrees with the request, all keys do.
        while keys and get_offload_block_hash(keys[-1]) not in self.req.block_hashes[len(keys) * every - 1 :][:1]:
            keys.pop()
    original(self)
