"""A request of the engine core: the weights that compute it, and the client's request of which it is a part.

vLLM's `Request` (vllm/v1/request.py, 0.30 to 0.33) is given a `LoRARequest` of its adapter's generation. By its id
batches find the slot; by its path the keys of cached prefixes differ from those of other weights.
"""

from __future__ import annotations

import os
import re
from typing import Any

from lora_plugins.ledger import Patch
from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.store.layout import is_digest
from lora_plugins.worker.lora_request import lora_request

# The ids by which vLLM's API server divides a client's request: a token of its beams, a prompt of several, one of n.
_BEAM = re.compile(r"(.+)-[0-9a-f]{16}-beam-\d+(-[0-9a-f]{8})?")
_PROMPT = re.compile(r"(cmpl-.+)-\d+-[0-9a-f]{8}")
_OF_SEVERAL = re.compile(r"\d+_(.+)")


def is_in_store(path: str) -> bool:
    """Whether a path is named by what is in it: that never changes."""
    return is_digest(os.path.basename(path))


def name_of(path: str) -> str:
    """What answers call the weights at a path: their digest, where they are in the store."""
    return os.path.basename(path) if is_in_store(path) else path


def weights_of(adapter: Adapter) -> str:
    """What answers call an adapter's weights."""
    return name_of(_path(adapter))


def assign(request: Any, adapter: Adapter) -> None:
    """Have a request that has not begun be computed with this generation."""
    before, path = request.lora_request, _path(adapter)
    if (before.lora_int_id, before.lora_path) == (adapter.key, path):
        return
    request.lora_request = lora_request(adapter.spec.name, adapter.key, path, is_3d=adapter.spec.is_3d)
    if before.lora_path != path:
        request.block_hashes.clear()
        request.update_block_hashes()


def move(request: Any, adapter: Adapter, hash_block_size: int) -> None:
    """Have a request that runs go on with the weights that its adapter has now.

    What it has computed with the ones before keeps its keys; what comes is found by no other request.
    """
    path = f"{_path(adapter)}#{request.request_id}"
    request.lora_request = lora_request(adapter.spec.name, adapter.key, path, is_3d=adapter.spec.is_3d)
    del request.block_hashes[request.num_computed_tokens // hash_block_size :]
    request.update_block_hashes()


def has_weights_of(request: Any, adapter: Adapter | None, spec: AdapterSpec) -> bool:
    """Whether a request was computed with what this generation has, or had when it was evicted."""
    key = request.lora_request.lora_int_id
    return bool(request.lora_request.lora_path == _path_of(spec, key if adapter is None else adapter.weights_key))


def is_beam(request_id: str) -> bool:
    """Whether a request is one token of a client's beams, so that more of the same client's come soon."""
    return _BEAM.fullmatch(request_id) is not None


def client_of(request_id: str) -> str:
    """What a client's request is called in all the requests that vLLM divides it into; empty where it does not.

    Source: vllm/entrypoints/generate/beam_search/online.py, vllm/entrypoints/openai/completion/serving.py,
    vllm/v1/engine/{parallel_sampling,input_processor}.py, 0.30 to 0.33.
    """
    of_several = _OF_SEVERAL.fullmatch(request_id)
    request_id = of_several.group(1) if of_several else request_id
    part = _BEAM.fullmatch(request_id) or _PROMPT.fullmatch(request_id)
    return part.group(1) if part else request_id if of_several else ""


def _path(adapter: Adapter) -> str:
    return _path_of(adapter.spec, adapter.weights_key)


def _path_of(spec: AdapterSpec, weights: int) -> str:
    """A path that no other weights have: where it is not in the store, with the load that read it."""
    is_enough = is_in_store(spec.path) or weights == spec.engine_id
    return spec.path if is_enough else f"{spec.path}#{weights}"


LEDGER = (
    Patch(
        """
        vllm.v1.request:
            Request{lora_request, block_hashes, num_computed_tokens, num_output_placeholders}
            Request.num_output_tokens(self)
            Request.update_block_hashes(self)
        """,
        what="written: a request's lora_request names the generation of its adapter, and its block hashes are made "
        "again from where that changes its path",
        why="batches find slots, and cached prefixes their weights, by vLLM's id and path, which callers give again",
        remove="vLLM's keys of cached prefixes hold the identity of an adapter's bytes (vllm-project/vllm#48352)",
    ),
)
