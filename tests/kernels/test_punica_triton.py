"""Our Triton wrapper as vLLM's own layers call it, in Triton's interpreter, against float64."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")

from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.lora.utils import from_layer
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from tests.kernels.triton_layers import (
    MIXED,
    SLOTS,
    Adapters,
    check,
    lora_config,
    make_wrapper,
    map_rows,
    ready,
    set_traps,
)
from tests.worker.small_model import one_process

IN, OUT = 24, 32
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# What vLLM finds for each: its class, the slices' widths, and the names that it packs into the layer.
LINEAR: dict[str, tuple[type, Callable[..., Any], tuple[int, ...], list[str]]] = {
    "column": (ColumnParallelLinearWithLoRA, lambda **k: ColumnParallelLinear(IN, OUT, **k), (OUT,), ["c"]),
    "row": (RowParallelLinearWithLoRA, lambda **k: RowParallelLinear(IN, OUT, **k), (OUT,), ["o"]),
    "replicated": (ReplicatedLinearWithLoRA, lambda **k: ReplicatedLinear(IN, OUT, **k), (OUT,), ["g"]),
    "merged": (
        MergedColumnParallelLinearWithLoRA,
        lambda **k: MergedColumnParallelLinear(IN, [OUT, OUT], **k),
        (OUT, OUT),
        ["gate", "up"],
    ),
    "merged, one pair": (
        ColumnParallelLinearWithLoRA,
        lambda **k: MergedColumnParallelLinear(IN, [OUT, OUT], **k),
        (2 * OUT,),
        ["gate_up"],
    ),
    "many slices": (
        MergedColumnParallelLinearVariableSliceWithLoRA,
        lambda **k: MergedColumnParallelLinear(IN, [8, 16, 8, 24], **k),
        (8, 16, 8, 24),
        ["a", "b", "c", "d"],
    ),
    "qkv": (
        MergedQKVParallelLinearWithLoRA,
        lambda **k: QKVParallelLinear(IN, 8, 4, 2, **k),
        (32, 16, 16),
        ["q", "k", "v"],
    ),
    "qkv, one pair": (QKVParallelLinearWithLoRA, lambda **k: QKVParallelLinear(IN, 8, 4, 2, **k), (64,), ["qkv"]),
}


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(tmp_path_factory.mktemp("distributed") / "rendezvous"):
        yield


def layer_of(
    which: str, wrapper: Any, dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[Any, tuple[int, ...]]:
    """vLLM's layer with LoRA for one of `LINEAR`, as its model manager makes it."""
    kind, make, widths, packed = LINEAR[which]
    layer = from_layer(ready(make(bias=False, params_dtype=dtype)), SLOTS, lora_config(dtype, **changes), packed)
    if not changes:
        assert type(layer) is kind
    layer.set_mapping(wrapper)
    wrapper.register(layer)  # as the wrapped `set_mapping` does, see vllm_patches/punica.py
    return layer, widths


def base_output(layer: Any, x: torch.Tensor) -> torch.Tensor:
    output = layer.base_layer(x)
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", LINEAR)
def test_linear_layers(which: str, dtype: torch.dtype) -> None:
    wrapper = make_wrapper(lora_config(dtype))
    layer, widths = layer_of(which, wrapper, dtype)
    adapters = Adapters.fill(layer, IN, widths, dtype=dtype)
    set_traps(layer)
    map_rows(wrapper, MIXED)
    x = torch.randn(len(MIXED) + 3, IN).to(dtype)  # the last three rows are padding
    before = base_output(layer, x)
    found, _ = layer(x)
    check(found, adapters.expected(before, x, MIXED), before, MIXED)


def test_a_towers_wrapper_leaves_the_language_models_ranks_known() -> None:
    """With --enable-tower-connector-lora vLLM makes three wrappers, and then the layers of each."""
    wrappers = [make_wrapper() for _ in ("language model", "tower", "connector")]
    layers = [layer_of("qkv", wrapper) for wrapper in wrappers]
    x = torch.randn(len(MIXED), IN)
    for wrapper, (layer, widths) in zip(wrappers, layers, strict=True):
        adapters = Adapters.fill(layer, IN, widths)
        set_traps(layer)
        map_rows(wrapper, MIXED)
        before = base_output(layer, x)
        check(layer(x)[0], adapters.expected(before, x, MIXED), before, MIXED)


def test_a_second_engine_in_the_process_leaves_the_first_as_it_was() -> None:
    """Its tuning table and its settings are its own, and it goes with its weights."""
    first = make_wrapper()
    layer, widths = layer_of("merged", first)
    adapters = Adapters.fill(layer, IN, widths)
    set_traps(layer)
    second = make_wrapper()
    other, _ = layer_of("merged", second)
    gone = weakref.ref(second)
    del second, other
    gc.collect()
    assert gone() is None
    map_rows(first, MIXED)
    x = torch.randn(len(MIXED), IN)
    before = base_output(layer, x)
    check(layer(x)[0], adapters.expected(before, x, MIXED), before, MIXED)


@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("which", ["column", "qkv"])
def test_a_layer_that_sees_the_first_rows_only(which: str, rows: int) -> None:
    """64 rows are mapped, of which slot order puts these last; the layer is given fewer."""
    wrapper = make_wrapper()
    layer, widths = layer_of(which, wrapper)
    adapters = Adapters.fill(layer, IN, widths)
    set_traps(layer)
    slots = [3, 2, 3, 2, *[0] * 40, *[2] * 20]
    map_rows(wrapper, slots)
    x = torch.randn(rows, IN)
    before = base_output(layer, x)
    check(layer(x)[0], adapters.expected(before, x, slots[:rows]), before, slots)
