"""Two versions under one name are two adapters, in a batch and in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu import lora_utils

from lora_plugins.vllm_patches import lora_request
from tests.vllm_patches.put_back import put_back


def request(adapter_id: int, path: str) -> LoRARequest:
    return LoRARequest(lora_name="sql", lora_int_id=adapter_id, lora_path=path)


@pytest.fixture(autouse=True)
def restored(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", kv_cache_utils._gen_lora_extra_hash_keys)
    with put_back(LoRARequest, InputProcessor):
        yield


def test_vllm_takes_two_versions_for_one_and_we_do_not() -> None:
    old, new = request(1, "/store/aa"), request(2, "/store/bb")
    lora_request.distinguish_versions()
    assert len({old, new, request(1, "/store/aa")}) == 2
    assert old == request(1, "/elsewhere")
    assert old != "sql"


def test_each_generation_counts_among_a_batchs_adapters() -> None:
    """With `--specialize-active-lora` the second model runner takes the kernels' grid by this number."""
    requests = {"before": request(1, "/store/aa"), "after": request(2, "/store/bb"), "moved": request(2, "/store/bb#m")}
    lora_request.distinguish_versions()
    state = lora_utils.LoraState(max_num_reqs=4)
    for index, (name, of) in enumerate(requests.items()):
        state.add_request(name, index, of)
    assert lora_utils.get_num_active_loras_for_dispatch(object(), state, list(requests), False) == 2


def test_prefixes_are_keyed_by_path_in_every_vllm(monkeypatch) -> None:
    """Up to 0.30 vLLM's keys hold the name only."""
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", _as_in_0_30)
    lora_request.distinguish_versions()
    keys = kv_cache_utils._gen_lora_extra_hash_keys
    old, new = (keys(SimpleNamespace(lora_request=request(n, path))) for n, path in ((1, "/aa"), (2, "/bb")))
    assert old != new
    assert keys(SimpleNamespace(lora_request=None)) == []


def test_vllms_keys_are_kept_where_they_hold_the_path() -> None:
    before = kv_cache_utils._gen_lora_extra_hash_keys
    lora_request.distinguish_versions()
    assert kv_cache_utils._gen_lora_extra_hash_keys is before
    old, new = (before(SimpleNamespace(lora_request=request(n, path))) for n, path in ((1, "/aa"), (2, "/bb")))
    assert old != new


def test_what_a_tower_has_seen_is_keyed_by_path() -> None:
    def identifiers(*, with_towers: bool) -> list[str]:
        processor = object.__new__(InputProcessor)
        processor.lora_config = SimpleNamespace(enable_tower_connector_lora=with_towers)
        return [processor._get_mm_identifier("image", one) for one in (None, old, new, again, *elsewhere)]

    aa, bb = "/store/" + "a" * 64, "/store/" + "b" * 64
    old, new, again, *elsewhere = (request(n, path) for n, path in enumerate((aa, bb, aa, "/aa", "/aa"), 1))
    lora_request.distinguish_versions()
    none, of_old, of_new, of_again, *of_elsewhere = identifiers(with_towers=True)
    assert none == "image"
    assert len({none, of_old, of_new, *of_elsewhere}) == 5, "outside the store, each load is of its own"
    assert of_again == of_old, "after a rollback it is there still"
    assert "/" not in of_old, "it is part of a file's name where encoders' outputs are transferred"
    assert set(identifiers(with_towers=False)) == {"image"}


@pytest.mark.parametrize("whose", ["_of_identity", "_of_identity_elsewhere"])
def test_keys_of_name_and_identity_are_kept(monkeypatch, whose) -> None:
    """vllm-project/vllm#48352, not merged when this was written: ours would take its identity out of the keys."""
    upstreams = globals()[whose]
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", upstreams)
    lora_request.distinguish_versions()
    keys = kv_cache_utils._gen_lora_extra_hash_keys
    assert keys is upstreams
    adapter = SimpleNamespace(lora_name="sql", lora_path="/aa", lora_identity="1f")
    assert keys(SimpleNamespace(lora_request=adapter)) == [("lora", "sql"), ("lora_identity", "1f")]


def _as_in_0_30(request) -> list[str]:
    return [request.lora_request.lora_name] if request.lora_request else []


def _of_identity(request) -> list[tuple[str, str]]:
    adapter = request.lora_request
    return [("lora", adapter.lora_name), ("lora_identity", adapter.lora_identity)] if adapter else []


def _of_identity_elsewhere(request) -> list[tuple[str, str]]:
    adapter = request.lora_request
    return [("lora", adapter.lora_name), _identity(adapter)] if adapter else []


def _identity(adapter) -> tuple[str, str]:
    return ("lora_identity", adapter.lora_identity)
