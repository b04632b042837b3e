"""Two versions of one adapter, under one name, in the engine at the same time.

`distinguish_versions` runs in every process as plugins are loaded. vLLM takes two requests' adapters for the same if
their names are the same: a batch with both versions would hold only one version, and the other's rows would be
computed with a stranger's slot. Here, name and id distinguish adapters in a batch, and the path, which changes with
the bytes, distinguishes them in caches.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.store.layout import key_of
from lora_plugins.vllm_patches.engine_core.request import is_in_store
from lora_plugins.vllm_patches.wrapping import wrap


def distinguish_versions() -> None:
    """Compare requests' adapters by name and id, and caches by name and path, in this process.

    Touches: vllm.lora.request: LoRARequest{__eq__(self, value), __hash__(self)}
    Why: a batch with two versions under one name would hold only one of them.
    Until: vLLM compares ids too.
    """
    from vllm.lora.request import LoRARequest
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.input_processor import InputProcessor

    LoRARequest.__eq__ = _is_same
    LoRARequest.__hash__ = _hash
    if _reads_name_only(kv_cache_utils._gen_lora_extra_hash_keys):  # noqa: SLF001 - up to 0.30
        kv_cache_utils._gen_lora_extra_hash_keys = _prefix_keys  # noqa: SLF001
    wrap(InputProcessor, "_get_mm_identifier", _get_mm_identifier)


def _reads_name_only(keys: Any) -> bool:
    """Return whether nothing but their names distinguishes the cached prefixes of adapters.

    Keys with anything more stay as they are, be the addition the path or, with vllm-project/vllm#48352, the bytes'
    identity.
    """
    return set(keys.__code__.co_names) <= {"lora_request", "lora_name"}


def _is_same(self: Any, value: object) -> bool:
    return isinstance(value, type(self)) and self.lora_name == value.lora_name and self.lora_int_id == value.lora_int_id


def _hash(self: Any) -> int:
    # Python drops an inherited hash of a class whose `__eq__` is replaced in its body; here both are set from outside.
    return hash((self.lora_name, self.lora_int_id))


def _get_mm_identifier(original: Any, self: Any, mm_hash: str, lora_request: Any) -> str:
    """Return vLLM's key of a tower's work on an image, with the adapter's path, which changes with the adapter's bytes.

    Outside the store the path may stay, and the key gets the id of the load. Only with `--enable-tower-connector-lora`.

    Why: vLLM's has its name: a new version would be given what the old one's tower has seen.
    Until: vLLM's key changes with the adapter's version.
    """
    identifier: str = original(self, mm_hash, lora_request)
    if identifier == mm_hash:  # a tower without adapters
        return identifier
    path = lora_request.lora_path
    load = [] if is_in_store(path) else [str(lora_request.lora_int_id)]
    return f"{key_of(path, *load)}:{identifier}"  # an operator's path may be no part of a file's name


def _prefix_keys(request: Any) -> list[str]:
    """Return the facts that a cached prefix of `request` depends on: the adapter's path changes with its bytes.

    In the place of vLLM's keys up to 0.30; keys of anything more than the adapter's name stay.

    Touches: vllm.v1.core.kv_cache_utils: _gen_lora_extra_hash_keys(request)
    Why: a new version must not read prefixes that the old one has computed.
    Until: vLLM 0.30 is no longer supported.
    """
    adapter = request.lora_request
    return [] if not adapter else [adapter.lora_name, adapter.lora_path]
