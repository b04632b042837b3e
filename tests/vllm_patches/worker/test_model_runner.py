"""What model runners do about numbers that are none: blocks are zeroed, and NaN in logits is counted."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_plugins.vllm_patches.worker import model_runner
from tests.vllm_patches.engine_bed import BLOCK, Make, vllm_config


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core
    from vllm.v1.kv_cache_interface import KVCacheConfig

    monkeypatch.setattr(core, "get_kv_cache_configs", core.get_kv_cache_configs)
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", KVCacheConfig.needs_kv_cache_zeroing)
    for _ in range(2):
        model_runner.patch()


def kv_cache_config(config: Any, spec: Any = None) -> Any:
    """What an engine makes of a configuration for a model of one layer: of `spec`, or with full attention."""
    from vllm.v1.engine import core
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = spec or FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    (made,) = core.get_kv_cache_configs(config, [{"layer": spec}], [1 << 30])
    return made


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("lora", "zeroed"), [(True, 2), (False, 0)])
def test_only_engines_with_lora_zero_blocks(make_engine: Make, lora: bool, zeroed: int) -> None:
    engine = make_engine(lora=lora)
    engine.answer("a", prompt=BLOCK + 1, tokens=BLOCK)
    blocks = [block for output in engine.sent for block in output.new_block_ids_to_zero or ()]
    assert len(blocks) == len(set(blocks)) == zeroed


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("model", ["Attention", "Mamba"])
@pytest.mark.parametrize("lora", [True, False])
def test_copies_say_what_engine_and_model_need(base: Path, model: str, lora: bool) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    mamba = MambaSpec(block_size=64, shapes=((8,),), dtypes=(torch.float32,))
    made = kv_cache_config(vllm_config(base, lora=lora), mamba if model == "Mamba" else None)
    for config in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert config.needs_kv_cache_zeroing == (lora or model == "Mamba")


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("connector", "zeroed"), [("MoRIIOConnector", False), ("NixlConnector", True)])
def test_what_a_transfer_writes_meanwhile_is_not_zeroed(base: Path, connector: str, zeroed: bool) -> None:
    from vllm.config import KVTransferConfig

    config = vllm_config(base)
    config.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    assert kv_cache_config(config).needs_kv_cache_zeroing == zeroed


def test_blocks_of_every_kind_are_zeroed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    monkeypatch.setattr(CPUModelRunner, "_zero_block_ids", CPUModelRunner._zero_block_ids)
    model_runner.patch_runners(SimpleNamespace())
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=4)),
        KVCacheGroupSpec(["own"], UniformTypeKVCacheSpecs(BLOCK, {"own": FullAttentionSpec(**shape)})),
    ]
    layers = {name: SimpleNamespace(kv_cache=torch.ones(4, 2, BLOCK, 8)) for name in ("full", "window", "own")}
    runner = object.__new__(CPUModelRunner)
    runner.kv_cache_config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    runner.compilation_config = SimpleNamespace(static_forward_context=layers)
    runner._zero_block_ids([1, 3])
    for layer in layers.values():
        assert layer.kv_cache.sum(dim=(1, 2, 3)).tolist() == [2 * BLOCK * 8, 0, 2 * BLOCK * 8, 0]


def test_nan_and_infinity_are_found_in_any_row() -> None:
    logits = torch.randn(6, 1000)
    logits[1] = logits[2] = float("-inf")
    logits[1, 7] = 1.0  # as structured output masks them
    logits[3, 999] = float("nan")
    logits[4] = float("nan")
    logits[5, 3] = float("inf")  # an overflow: its softmax is NaN
    assert model_runner.not_finite_in_rows(logits).tolist() == [0, 0, 0, 1, 1, 1]
    assert model_runner.not_finite_in_rows(logits.to(torch.bfloat16)).tolist() == [0, 0, 0, 1, 1, 1]


def test_both_of_vllms_runners_ask_us(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import gpu_model_runner

    second = SimpleNamespace(get_num_nans=None)
    monkeypatch.setattr(gpu_model_runner, "count_nans_per_row", None)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.sample.sampler", second)
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.gpu.spec_decode.rejection_sampler", raising=False)
    model_runner.patch_runners(SimpleNamespace())
    assert gpu_model_runner.count_nans_per_row is second.get_num_nans is model_runner.not_finite_in_rows
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.gpu_model_runner")
    model_runner.patch_runners(SimpleNamespace())


# --- as vLLM's next releases will have it ---


@pytest.mark.parametrize("is_on", [True, False])
def test_vllms_own_switch_leaves_its_counting_alone(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    """vllm-project/vllm#50283: with this switch vLLM ends requests of the base model too, which may have infinity."""
    from vllm.v1.worker import gpu_model_runner

    vllms = gpu_model_runner.count_nans_per_row
    monkeypatch.setattr(gpu_model_runner, "count_nans_per_row", vllms)
    tolerance = SimpleNamespace(enable_nan_fault_tolerance=is_on)
    model_runner.patch_runners(SimpleNamespace(fault_tolerance_config=tolerance))
    assert gpu_model_runner.count_nans_per_row is (vllms if is_on else model_runner.not_finite_in_rows)


@pytest.mark.parametrize("kind", ["property", "field"])
@pytest.mark.parametrize("of_vllm", [True, False])
@pytest.mark.parametrize("lora", [True, False])
def test_what_vllm_has_zeroed_stays(
    monkeypatch: pytest.MonkeyPatch, base: Path, kind: str, of_vllm: bool, lora: bool
) -> None:
    """vllm-project/vllm#50283: `needs_kv_cache_zeroing` is true for every model where its switch is on."""
    from vllm.v1.engine import core
    from vllm.v1.kv_cache_interface import KVCacheConfig

    vllms = of_vllm if kind == "field" else property(lambda _: of_vllm)
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", vllms)
    monkeypatch.setattr(core, "get_kv_cache_configs", core.get_kv_cache_configs)
    model_runner.patch()
    made = kv_cache_config(vllm_config(base, lora=lora))
    for config in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert config.needs_kv_cache_zeroing == (of_vllm or lora)


WITHOUT_THE_FIRST_RUNNER = """
import sys
for name in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.cpu_model_runner"):
    sys.modules[name] = None  # an import of it raises
from types import SimpleNamespace
from lora_plugins.process import this_process
from lora_plugins.vllm_patches import installation
from lora_plugins.vllm_patches.worker import model_runner
installation.install_manager(this_process())
model_runner.patch_runners(SimpleNamespace())
import lora_plugins.worker.manager
print("installed")
"""


@pytest.mark.nightly  # a process that imports vLLM
def test_the_manager_does_without_vllms_first_model_runner() -> None:
    """vllm-project/vllm#41286 takes its module away."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_FIRST_RUNNER], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["installed"], done.stderr[-2000:]


# --- which of them is counted ---


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_nan_is_counted_unless_switched_off(monkeypatch: pytest.MonkeyPatch, before: str | None, after: str) -> None:
    monkeypatch.setenv(model_runner.VARIABLE, before or "")
    if before is None:
        monkeypatch.delenv(model_runner.VARIABLE)
    model_runner.patch()
    assert os.environ[model_runner.VARIABLE] == after
    monkeypatch.delenv(model_runner.VARIABLE)
