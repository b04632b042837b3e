"""Our Triton wrapper as vLLM's own layers call it, in Triton's interpreter, against float64."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")

from vllm.lora import layers as lora_layers
from vllm.lora.layers import classifier
from vllm.lora.utils import from_layer, from_layer_classification, from_layer_logits_processor
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from lora_plugins.errors import IncompatibleAdapter, InvalidSettings
from lora_plugins.kernels.dispatch import TRITON_WRAPPER
from lora_plugins.kernels.triton_ops.rank_tables import _RankTable
from tests.kernels.common import padded_to
from tests.kernels.triton_bed import TOLERANCE
from tests.kernels.triton_layers import (
    MIXED,
    RANKS,
    SLOTS,
    VOCABULARY,
    Adapters,
    check,
    lora_config,
    make_wrapper,
    map_rows,
    ready,
    set_traps,
    with_mapping,
)
from tests.worker import small_model
from tests.worker.small_model import one_process

IN, OUT = 24, 32
# What vLLM finds for each: its class, the slices' widths, and the names that it packs into the layer.
LINEAR: dict[str, tuple[type, Callable[..., Any], tuple[int, ...], list[str]]] = {
    "column": (
        lora_layers.ColumnParallelLinearWithLoRA,
        lambda **k: linear.ColumnParallelLinear(IN, OUT, **k),
        (OUT,),
        ["c"],
    ),
    "row": (lora_layers.RowParallelLinearWithLoRA, lambda **k: linear.RowParallelLinear(IN, OUT, **k), (OUT,), ["o"]),
    "replicated": (
        lora_layers.ReplicatedLinearWithLoRA,
        lambda **k: linear.ReplicatedLinear(IN, OUT, **k),
        (OUT,),
        ["g"],
    ),
    "merged": (
        lora_layers.MergedColumnParallelLinearWithLoRA,
        lambda **k: linear.MergedColumnParallelLinear(IN, [OUT, OUT], **k),
        (OUT, OUT),
        ["left", "right"],
    ),
    "merged, one pair": (
        lora_layers.ColumnParallelLinearWithLoRA,
        lambda **k: linear.MergedColumnParallelLinear(IN, [OUT, OUT], **k),
        (2 * OUT,),
        ["gate_up"],
    ),
    "many slices": (
        lora_layers.MergedColumnParallelLinearVariableSliceWithLoRA,
        lambda **k: linear.MergedColumnParallelLinear(IN, [8, 16, 8, 24], **k),
        (8, 16, 8, 24),
        ["a", "b", "c", "d"],
    ),
    "qkv": (
        lora_layers.MergedQKVParallelLinearWithLoRA,
        lambda **k: linear.QKVParallelLinear(IN, 8, 4, 2, **k),
        (32, 16, 16),
        ["q", "k", "v"],
    ),
    "qkv, one pair": (
        lora_layers.QKVParallelLinearWithLoRA,
        lambda **k: linear.QKVParallelLinear(IN, 8, 4, 2, **k),
        (64,),
        ["qkv"],
    ),
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
    return with_mapping(layer, wrapper), widths


def base_output(layer: Any, x: torch.Tensor) -> torch.Tensor:
    output = layer.base_layer(x)
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("why", [None, "fully sharded", "dual stream"])
def test_only_layers_that_take_vectors_have_memory_for_them(why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    base, config = (
        ready(linear.RowParallelLinear(IN, OUT, bias=False)),
        lora_config(fully_sharded_loras=why == "fully sharded"),
    )
    wrapper, layer = make_wrapper(config), from_layer(base, SLOTS, config, ["o"])
    monkeypatch.setenv("VLLM_LORA_ENABLE_DUAL_STREAM", str(int(why == "dual stream")))
    with_mapping(layer, wrapper)
    _, known = wrapper._operators.module([], layer.lora_b_stacked, (OUT,), 0)
    assert known.vectors.shape == (SLOTS, 2, 0 if why else OUT)


@pytest.mark.parametrize(
    ("which", "dtype"),
    [
        *((which, torch.float32) for which in LINEAR),
        *(
            pytest.param(which, dtype, marks=[] if which == "merged" else pytest.mark.nightly)
            for which in LINEAR
            for dtype in (torch.float16, torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_linear_layers(which: str, dtype: torch.dtype) -> None:
    """Of three adapters one is plain, one has a pair and vectors, and one has vectors for the layer and no pair."""
    wrapper = make_wrapper(lora_config(dtype))
    layer, widths = layer_of(which, wrapper, dtype)
    adapters = Adapters.fill(layer, IN, widths, dtype=dtype, ranks={0: 16, 2: 5})
    set_traps(layer)
    adapters.turn(layer, 2, 3)
    map_rows(wrapper, MIXED)
    x = torch.randn(len(MIXED) + 3, IN).to(dtype)  # the last three rows are padding
    before = base_output(layer, x)
    with padded_to(len(x)):
        found, _ = layer(x)
    check(found, adapters.expected(before, x, MIXED), before, MIXED)
    layer.reset_lora(3)
    adapters.vectors.pop(3)
    map_rows(wrapper, [3, 2])
    assert torch.equal(layer(x[:2])[0][0], before[0]), "the vectors left with the slot's content"


def test_rows_that_vllm_has_named_no_adapter_of_are_refused() -> None:
    """An encoder's, say; they are no padding, and would be computed silently as the base model's."""
    wrapper = make_wrapper()
    layer, widths = layer_of("qkv", wrapper)
    x = torch.randn(len(MIXED) + 3, IN)
    map_rows(wrapper, MIXED)
    before = base_output(layer, x)
    for slot in range(SLOTS):
        layer.reset_lora(slot)
    assert torch.equal(layer(x)[0], before)  # no adapter adapts the layer
    adapters = Adapters(widths)
    adapters.turn(layer, 1)
    for give in (lambda: None, lambda: Adapters.fill(layer, IN, widths)):
        give()
        with pytest.raises(IncompatibleAdapter, match="a layer of 10 rows, of which vLLM names the adapters of 7"):
            layer(x)
    map_rows(wrapper, [-1] * 7)
    assert torch.equal(layer(x)[0], before)


def test_batches_follow_each_other_and_slots_are_written_again() -> None:
    """vLLM announces a batch only when it changes; an adapter that is loaded in place changes none."""
    wrapper = make_wrapper()
    layer, widths = layer_of("column", wrapper)
    x = torch.randn(len(MIXED), IN)
    before = base_output(layer, x)
    map_rows(wrapper, MIXED)
    for ranks in ({0: 8, 2: 16, 3: 1}, {0: 2, 2: 2, 3: 2}, RANKS):
        adapters = Adapters.fill(layer, IN, widths, ranks=ranks)
        set_traps(layer)
        check(layer(x)[0], adapters.expected(before, x, MIXED), before, MIXED)
        layer.lora_a_stacked[0].nan_to_num_(0)
    for part in (*layer.lora_a_stacked, *layer.lora_b_stacked):
        part.nan_to_num_(0)
    adapters = Adapters.fill(layer, IN, widths)
    set_traps(layer)
    for slots in ([0] * 7, [-1] * 7, [2, 2, -1, -1, 3, 3, 0], [3]):
        map_rows(wrapper, slots)
        with padded_to(len(x)):
            found = layer(x)[0]
        check(found, adapters.expected(before, x, slots), before, slots)


@pytest.mark.parametrize("shape", [(1, len(MIXED), IN), (len(MIXED), IN)], ids=["batch of one", "rows"])
def test_the_lora_part_alone_as_two_streams_compute_it(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_LORA_ENABLE_DUAL_STREAM: zeros are handed in, with `add_inputs=False`, and added to the base output."""
    wrapper = make_wrapper()
    layer, widths = layer_of("qkv", wrapper)
    adapters = Adapters.fill(layer, IN, widths)
    set_traps(layer)
    map_rows(wrapper, MIXED)
    x = torch.randn(shape)
    before = base_output(layer, x)
    monkeypatch.setenv("VLLM_LORA_ENABLE_DUAL_STREAM", "1")
    layer._events, layer._lora_stream = [None, None], None  # then both parts run on one stream
    found = layer._apply_async_impl(x).view(len(MIXED), -1)
    check(found, adapters.expected(before.view_as(found), x.view(-1, IN), MIXED), before.view_as(found), MIXED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings(dtype: torch.dtype) -> None:
    wrapper = make_wrapper(lora_config(dtype))
    base = ready(VocabParallelEmbedding(VOCABULARY, OUT, params_dtype=dtype))
    layer = from_layer(base, SLOTS, lora_config(dtype), [])
    assert type(layer) is lora_layers.VocabParallelEmbeddingWithLoRA
    with_mapping(layer, wrapper)
    adapters = Adapters.fill(layer, VOCABULARY, (OUT,), dtype=dtype)
    set_traps(layer)
    map_rows(wrapper, MIXED)
    tokens = torch.randint(0, VOCABULARY, (len(MIXED),))
    before = base(tokens).clone()
    one_hot = torch.nn.functional.one_hot(tokens, VOCABULARY).to(dtype)
    check(layer(tokens), adapters.expected(before, one_hot, MIXED), before, MIXED)


@pytest.mark.parametrize(
    ("dtype", "head_dtype"), [(torch.float32, None), (torch.float16, torch.float32), (torch.bfloat16, None)], ids=str
)
def test_logits_follow_the_sampled_rows(dtype: torch.dtype, head_dtype: torch.dtype | None) -> None:
    wrapper = make_wrapper(lora_config(dtype))
    head = ready(ParallelLMHead(VOCABULARY, IN, params_dtype=dtype))
    processor = LogitsProcessor(VOCABULARY)
    processor.head_dtype = head_dtype
    layer = from_layer_logits_processor(processor, head, SLOTS, lora_config(dtype))
    with_mapping(layer, wrapper)
    adapters = Adapters.fill(layer, IN, (VOCABULARY,), dtype=dtype)
    set_traps(layer)
    map_rows(wrapper, [2] * 9 + [-1] * 4 + [0] * 5, sampled=MIXED)
    x = torch.randn(len(MIXED), IN).to(dtype)
    before = processor._apply_head(head, x, None)[:, :VOCABULARY]
    found = layer._get_logits(x, head)
    assert found.dtype == (head_dtype or dtype)
    check(found, adapters.expected(before, x, MIXED), before, MIXED, tolerance=TOLERANCE[dtype])


def of_sequences() -> tuple[Any, list[int], list[int] | None]:
    layer = from_layer_classification(ready(linear.ReplicatedLinear(IN, 3, bias=True)), SLOTS, lora_config())
    if not hasattr(layer, "full_weight_stacked"):
        pytest.skip("vLLM has whole heads since 0.31")
    return layer, [0] * 9, [0, 2, -1, 3]


def of_tokens() -> tuple[Any, list[int], list[int] | None]:
    kind = getattr(classifier, "TokenClassificationHeadWithLoRA", None)
    if kind is None:
        pytest.skip("vLLM has heads for tokens since 0.33")
    layer = kind(ready(linear.ReplicatedLinear(IN, 3, bias=True)))
    layer.create_lora_weights(SLOTS, lora_config())
    return layer, MIXED, None


@pytest.mark.parametrize("make", [of_sequences, of_tokens])
def test_classification_heads_have_whole_heads_and_pairs(make: Callable[[], Any]) -> None:
    """A whole head (`modules_to_save`) takes the place of the base model's."""
    wrapper = make_wrapper()
    layer, slot_of_row, sampled = make()
    with_mapping(layer, wrapper)
    adapters = Adapters.fill(layer, IN, (3,), ranks={0: 5, 3: 16})
    set_traps(layer)
    weight, bias = torch.randn(3, IN), torch.randn(3)
    layer.set_module_to_save(2, weight, bias)
    map_rows(wrapper, slot_of_row, sampled)
    slots = sampled or slot_of_row
    layer.set_output_mapping(tuple(slots))
    x = torch.randn(len(slots) + (0 if sampled else 2), IN)  # two rows of padding
    before = base_output(layer, x)
    expected = adapters.expected(before, x, slots)
    for row in (row for row, slot in enumerate(slots) if slot == 2):
        expected[row] = weight.double() @ x[row].double() + bias
    check(layer(x), expected, before, slots)


def test_several_wrappers_leave_each_other_as_they_were() -> None:
    """A second engine's, which goes with its weights, and those of a tower and a connector, made before any layer."""
    wrappers = [make_wrapper() for _ in ("language model", "tower", "connector", "second engine")]
    layers = [layer_of("column", wrapper) for wrapper in wrappers]
    gone = weakref.ref(wrappers.pop())
    layers.pop()
    gc.collect()
    assert gone() is None
    x = torch.randn(len(MIXED), IN)
    for wrapper, (layer, widths) in zip(wrappers, layers, strict=True):
        adapters = Adapters.fill(layer, IN, widths)
        set_traps(layer)
        map_rows(wrapper, MIXED)
        before = base_output(layer, x)
        check(layer(x)[0], adapters.expected(before, x, MIXED), before, MIXED)


@pytest.mark.parametrize("by_vllm", [False, True], ids=["ours alone", "experts too"])
def test_vllms_grouping_of_rows_is_done_for_experts_alone(by_vllm: bool) -> None:
    """vLLM waits for the device to group rows, in every step: its kernels need the groups, ours do not."""
    wrapper = make_wrapper()
    layer_of("column", wrapper)
    if by_vllm:
        wrapper.register(torch.nn.Identity())  # a layer that only vLLM's kernels compute
    grouped = wrapper._grouping[0].num_tokens_per_lora
    before = grouped.clone()
    map_rows(wrapper, MIXED)
    assert (not torch.equal(grouped, before)) is by_vllm
    if by_vllm:
        assert wrapper.token_mapping_meta.num_tokens_per_lora is grouped
        return
    with pytest.raises(InvalidSettings, match="compiled for vLLM's own LoRA kernels"):
        _ = wrapper.token_mapping_meta.num_tokens_per_lora


@pytest.mark.parametrize(("which", "rows"), [("column", 4), ("qkv", 1)])
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


@pytest.mark.parametrize("manager", ["vllm", "lora_plugins"])
def test_activating_an_adapter_copies_all_ranks_at_once(
    manager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch for each layer's rank would be hundreds of launches."""
    small_model.use_kernels(monkeypatch, TRITON_WRAPPER)
    config = small_model.vllm_config(small_model.base_directory(tmp_path / "base"))
    made = small_model.manager_of(config, LRUCacheWorkerLoRAManager if manager == "vllm" else None)
    modules = made._adapter_manager.modules
    copied: list[int] = []
    copy = _RankTable._copy
    monkeypatch.setattr(_RankTable, "_copy", lambda self, slot: (copied.append(slot), copy(self, slot)))
    adapter = small_model.make_adapter(tmp_path / "a", 1, rank=3)
    if manager == "vllm":
        made.add_adapter(adapter.request())
        slot = made._adapter_manager.lora_index_to_id.index(1)
    else:
        small_model.serve(made, adapter, 1)
        slot = 1
    assert copied == [slot]
    for module in modules.values():
        ranks = module._lora_plugins_ranks[slot]
        _, known = module.punica_wrapper._operators.module(
            module.lora_a_stacked, module.lora_b_stacked, module.output_slices, 0
        )
        assert known.device_ranks[:, slot].tolist() == [*ranks, 0]
        assert set(ranks) == {3}
