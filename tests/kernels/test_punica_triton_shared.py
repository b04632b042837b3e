"""Layers that our Triton wrapper shares with others: fully sharded among workers, or vLLM's own (experts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")

from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA, column_parallel_linear, row_parallel_linear
from vllm.lora.layers.column_parallel_linear import (
    ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithShardedLoRA,
)
from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithShardedLoRA
from vllm.lora.utils import from_layer
from vllm.model_executor.layers import linear

from tests.kernels.common import padded_to
from tests.kernels.experts_layer import experts_layer
from tests.kernels.test_punica_triton import IN, LINEAR, OUT
from tests.kernels.triton_layers import (
    MAX_RANK,
    MIXED,
    RANKS,
    SLOTS,
    Adapters,
    check,
    lora_config,
    make_wrapper,
    map_rows,
    ready,
    set_traps,
    with_mapping,
)
from tests.worker.small_model import one_process

WORKERS = 2
# Of `LINEAR`'s layers: the class that vLLM finds where they are fully sharded, and the slices' widths.
COLUMN: dict[str, tuple[type, tuple[int, ...]]] = {
    "column": (ColumnParallelLinearWithShardedLoRA, (OUT,)),
    "merged": (MergedColumnParallelLinearWithShardedLoRA, (OUT, OUT)),
    "qkv": (MergedQKVParallelLinearWithShardedLoRA, (32, 16, 16)),
    "qkv, one pair": (QKVParallelLinearWithShardedLoRA, (32, 16, 16)),
}


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(tmp_path_factory.mktemp("distributed") / "rendezvous"):
        yield


@pytest.fixture(autouse=True)
def padded() -> Iterator[None]:
    """Inputs have a row of padding."""
    with padded_to(len(MIXED) + 1):
        yield


def workers(
    monkeypatch: pytest.MonkeyPatch, kind: type, make: Callable[[], Any], packed: list[str], count: int
) -> list[tuple[Any, Any]]:
    """The wrapper and the layer of each worker, with nothing between the workers yet."""
    made = []
    config = lora_config(fully_sharded_loras=True)
    for rank in range(count):
        with monkeypatch.context() as patched:
            patched.setattr(linear, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            patched.setattr(linear, "get_tensor_model_parallel_world_size", lambda: count)
            layer = from_layer(ready(make()), SLOTS, config, packed)
        assert isinstance(layer, kind) or count == 1  # then vLLM divides some no further
        assert (layer.tp_size, layer.tp_rank) == (count, rank)
        wrapper = make_wrapper(config)
        made.append((wrapper, with_mapping(layer, wrapper)))
        map_rows(wrapper, MIXED)
    return made


def shrunk(worker: tuple[Any, Any], x: torch.Tensor) -> torch.Tensor:
    """What the worker's layer hands to the collective operation."""
    wrapper, layer = worker
    buffer = torch.zeros(len(layer.lora_a_stacked), x.shape[0], layer.lora_a_stacked[0].shape[2])
    wrapper.add_shrink(buffer, x, layer.lora_a_stacked, 1.0)
    return buffer


def give(layers: list[Any], slot: int, a: Any, b: Any) -> None:
    for layer in layers:
        layer.set_lora(slot, a, b)


@pytest.mark.parametrize("count", [1, WORKERS])
@pytest.mark.parametrize("which", COLUMN)
def test_fully_sharded_columns(which: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A is divided by rank, so the slots of A and B differ in rank; the parts are gathered between the products."""
    (kind, widths), (_, make, _, packed) = COLUMN[which], LINEAR[which]
    team = workers(monkeypatch, kind, lambda: make(bias=False), packed, count)
    layers = [layer for _, layer in team]
    adapters = Adapters.fill(
        layers[0], IN, widths, packed=len(packed) > 1 or len(widths) == 1, give=partial(give, layers)
    )
    if count == 1:
        set_traps(layers[0])
    x = torch.randn(len(MIXED) + 1, IN)
    monkeypatch.setattr(
        column_parallel_linear,
        "tensor_model_parallel_all_gather",
        lambda _: torch.cat([shrunk(worker, x) for worker in team], -1),
    )
    for rank, layer in enumerate(layers):
        mine = Adapters([width // count for width in widths])
        for slot, sides in adapters.sides.items():
            mine.sides[slot] = [side and (side[0], side[1].chunk(count)[rank]) for side in sides]
        before = layer.base_layer(x)[0]
        check(layer(x)[0], mine.expected(before, x, MIXED), before, MIXED)


@pytest.mark.parametrize("count", [1, WORKERS])
def test_fully_sharded_rows(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has a part of the input and, of B, its own columns of the output; sums are added in between."""
    team = workers(
        monkeypatch,
        RowParallelLinearWithShardedLoRA,
        lambda: linear.RowParallelLinear(IN, OUT, bias=False, reduce_results=False),
        ["o"],
        count,
    )
    layers = [layer for _, layer in team]
    adapters = Adapters.fill(layers[0], IN, (OUT,), give=partial(give, layers))
    for layer in layers:
        set_traps(layer)
    x = torch.randn(len(MIXED) + 1, IN)
    parts = [part.contiguous() for part in x.chunk(count, -1)]
    monkeypatch.setattr(
        row_parallel_linear,
        "tensor_model_parallel_all_reduce",
        lambda _: torch.stack([shrunk(worker, part) for worker, part in zip(team, parts, strict=True)]).sum(0),
    )
    delta = adapters.expected(torch.zeros(len(x), OUT), x, MIXED)
    for rank, layer in enumerate(layers):
        before = layer.base_layer(parts[rank])[0]
        columns = slice(rank * OUT // count, (rank + 1) * OUT // count)
        expected = before.double()
        expected[:, columns] += delta[:, columns]
        check(layer(parts[rank])[0], expected, before, MIXED)


EXPERTS, HIDDEN, INNER, TOP_K = 16, 32, 16, 2


def with_triton(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A copy of a vLLM module whose Triton kernels run in the interpreter; vLLM finds no Triton without a GPU."""
    import importlib.util

    import triton
    import vllm.triton_utils
    from vllm.utils import torch_utils

    def not_as_an_operator(**_: Any) -> None:
        raise AttributeError("then the module calls its functions themselves")

    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patched:
        patched.setattr(vllm.triton_utils, "triton", triton)
        patched.setattr(vllm.triton_utils, "tl", triton.language)
        patched.setattr(torch_utils, "direct_register_custom_op", not_as_an_operator)
        spec.loader.exec_module(copy)
    return copy


@pytest.mark.parametrize("kind", [FusedMoEWithLoRA, FusedMoE3DWithLoRA], ids=["2D", "3D"])
def test_experts_are_computed_by_vllms_kernels(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need vLLM's grouping of the batch, which our wrapper leaves out where nothing does."""
    module = with_triton(monkeypatch, "vllm.lora.ops.triton_ops.fused_moe_lora_op")
    monkeypatch.setattr("vllm.lora.punica_wrapper.punica_gpu.fused_moe_lora", module.fused_moe_lora, raising=False)
    wrapper = make_wrapper()
    layer = experts_layer(kind, lora_config(), EXPERTS, HIDDEN, INNER)
    wrapper.register(layer)
    slices = layer._w13_slices
    ranks = dict.fromkeys(RANKS, MAX_RANK)
    given: dict[int, tuple[Any, Any]] = {}
    for slot, rank in ranks.items():
        a = torch.randn(EXPERTS, rank, HIDDEN) / 4
        b = [torch.randn(EXPERTS, INNER * (2 // slices), rank) / 4 for _ in range(slices)]
        down = torch.randn(EXPERTS, rank, INNER) / 4, torch.randn(EXPERTS, HIDDEN, rank) / 4
        layer.set_lora(slot, [a, down[0], a] if slices == 2 else [a, down[0]], [b[0], down[1], *b[1:]])
        given[slot] = a, torch.cat(b, 1)
    slots = [0, -1, 3, 2]
    map_rows(wrapper, slots)
    x = torch.randn(len(slots), HIDDEN)
    topk_ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in slots]).to(torch.int32)
    topk_weights = torch.rand(len(slots), TOP_K)
    y = torch.randn(len(slots) * TOP_K, 2 * INNER)
    before = y.clone()
    wrapper.add_lora_w13(
        y, x, layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, topk_ids, topk_weights, None,
        torch.empty(EXPERTS, 2 * INNER, HIDDEN), torch.empty(EXPERTS, HIDDEN, INNER), len(slots), TOP_K, SLOTS,
        layer.adapter_enabled, EXPERTS, TOP_K, slices, False, False,
    )  # fmt: skip
    expected = before.double().view(len(slots), TOP_K, -1)
    for row, slot in enumerate(slots):
        for place, expert in enumerate(topk_ids[row].tolist()):
            if slot in given:
                a, b = given[slot]
                expected[row, place] += b[expert].double() @ a[expert].double() @ x[row].double()
    per_row = [slot for slot in slots for _ in range(TOP_K)]
    check(y, expected.view_as(y), before, per_row, tolerance=1e-5)
