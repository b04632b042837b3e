"""Two versions under one name are two adapters, in a batch and in the prefix cache."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

from lora_plugins.vllm_patches import lora_request


def request(adapter_id: int, path: str) -> LoRARequest:
    return LoRARequest(lora_name="sql", lora_int_id=adapter_id, lora_path=path)


def test_vllm_takes_two_versions_for_one_and_we_do_not(monkeypatch) -> None:
    vllms = (LoRARequest.__eq__, LoRARequest.__hash__)
    old, new = request(1, "/store/aa"), request(2, "/store/bb")
    try:
        lora_request.distinguish_versions()
        assert len({old, new, request(1, "/store/aa")}) == 2
        assert old == request(1, "/elsewhere")
        assert old != "sql"
    finally:
        LoRARequest.__eq__, LoRARequest.__hash__ = vllms


def test_prefixes_are_keyed_by_path_in_every_vllm(monkeypatch) -> None:
    """Up to 0.30 vLLM's keys hold the name only."""
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", _as_in_0_30)
    vllms = (LoRARequest.__eq__, LoRARequest.__hash__)
    try:
        lora_request.distinguish_versions()
    finally:
        LoRARequest.__eq__, LoRARequest.__hash__ = vllms
    keys = kv_cache_utils._gen_lora_extra_hash_keys
    old, new = (keys(SimpleNamespace(lora_request=request(n, path))) for n, path in ((1, "/aa"), (2, "/bb")))
    assert old != new
    assert keys(SimpleNamespace(lora_request=None)) == []


def test_vllms_keys_are_kept_where_they_hold_the_path(monkeypatch) -> None:
    before = kv_cache_utils._gen_lora_extra_hash_keys
    vllms = (LoRARequest.__eq__, LoRARequest.__hash__)
    try:
        lora_request.distinguish_versions()
    finally:
        LoRARequest.__eq__, LoRARequest.__hash__ = vllms
    assert kv_cache_utils._gen_lora_extra_hash_keys is before
    old, new = (before(SimpleNamespace(lora_request=request(n, path))) for n, path in ((1, "/aa"), (2, "/bb")))
    assert old != new


def _as_in_0_30(request) -> list[str]:
    return [request.lora_request.lora_name] if request.lora_request else []
