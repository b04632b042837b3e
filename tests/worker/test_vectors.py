"""Modules compute `g * (W x + s B A x) + c` with the vectors of the adapter in a row's slot, as PEFT computes it."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from lora_plugins.adapter.model_modules import ModelModules
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter
from lora_plugins.kernels import packing
from lora_plugins.kernels.dispatch import TRITON_WRAPPER
from lora_plugins.kernels.punica_cpu import CompiledPunicaWrapperCPU
from lora_plugins.scheduler.messages import Loaded, Move
from lora_plugins.worker import loop_work, row_norms, slot_counts, vectors
from lora_plugins.worker.weights_file import patch_safetensors
from tests.repetitions import IS_LONG
from tests.worker import small_model
from tests.worker.small_model import (
    LAYERS,
    PACKED,
    SHAPES,
    Adapter,
    Make,
    bring,
    evict,
    failure,
    load,
    make_adapter,
    put,
    serve,
    slots_of,
    step,
)  # fmt: skip

PEFT = "base_model.model."
MODULES = [f"layers.{layer}.{name}" for layer in range(LAYERS) for name in SHAPES]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of random weights, with biases of some layers, whose layers compute as after loading weights."""
    from vllm.lora import lora_model

    make = small_model.small_model

    def made() -> Any:
        of_vllm, generator = make(), torch.Generator().manual_seed(3)
        for name, module in of_vllm.named_modules():
            if hasattr(module, "quant_method"):
                module.weight.data = torch.randn(module.weight.shape, generator=generator)
                module.cpu_linear = torch.nn.functional.linear
                if name.endswith(("qkv_proj", "down_proj")):
                    size = module.weight.shape[0]
                    module.bias = torch.nn.Parameter(torch.randn(size, generator=generator), requires_grad=False)
        return of_vllm

    small_model.use_compiled_kernels(monkeypatch)
    monkeypatch.setattr(lora_model, "safetensors", lora_model.safetensors)  # to be put back
    patch_safetensors()
    monkeypatch.setattr(small_model, "small_model", made)


@pytest.fixture(params=["placed", "copied", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that point at what was packed, or into which adapters are copied; and the GPU's, interpreted."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
        from vllm.lora.punica_wrapper import punica_gpu

        # vLLM imports the class itself only where it finds a GPU.
        monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
        small_model.use_kernels(monkeypatch, TRITON_WRAPPER)
    elif request.param == "copied":
        for user in (packing, slot_counts):
            monkeypatch.setattr(user, "are_pointed", lambda *_, **__: False)


def numbers(name: str, seed: int) -> torch.Tensor:
    size = SHAPES[name.rsplit(".", 1)[-1]][1]
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) + 2


def adapter(directory: Path, number: int, *kinds: str, **options: Any) -> Adapter:
    """An adapter with such tensors of every module; a bias where the base model has one."""
    tensors = {}
    for place, name in enumerate(MODULES):
        leaf = name.rsplit(".", 1)[-1]
        for kind in kinds:
            if kind != "bias" or leaf in ("q_proj", "k_proj", "v_proj", "down_proj"):
                vector = numbers(name, 100 * number + place)
                tensors[f"{PEFT}{name}.{kind}"] = vector[:, None] if kind == "ia3_l" else vector
    if "ia3_l" in kinds:
        options["modules"] = {}  # IA3 has no A and B
    keys = {
        "lora_magnitude_vector": "use_dora",
        "lora_B.bias": "lora_bias",
        "bias": "bias",
        "ia3_l": "peft_type IA3",
    }
    options["lora_plugins"] = [keys[kind] for kind in kinds]  # as the store writes it
    return make_adapter(directory / str(number), number, change=tensors | options.pop("change", {}), **options)


def of_base(module: Any, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    base = module.base_layer
    return base.weight[part], base.bias[part] if base.bias is not None else torch.zeros(len(base.weight[part]))


def by_peft(it: Adapter | None, name: str, number: int, kinds: tuple[str, ...], weight: Any, bias: Any, x: Any) -> Any:
    """The formulas of PEFT 0.21: `forward` of `LoraLayer`, `DoraLinearLayer` and IA3's `Linear`, for one module."""
    if it is None:
        return x @ weight.T + bias
    seed = 100 * number + MODULES.index(name)
    if "ia3_l" in kinds:
        return (x @ weight.T + bias) * numbers(name, seed)
    a, b = it.a.get(name), it.b.get(name)
    has_bias = "bias" in kinds and name.rsplit(".", 1)[-1] in ("q_proj", "k_proj", "v_proj", "down_proj")
    delta = torch.zeros_like(weight) if a is None or b is None else b @ a
    scale = torch.ones(len(weight))
    if "lora_magnitude_vector" in kinds and a is not None:
        scale = numbers(name, seed) / torch.linalg.norm(weight + delta, dim=1)
    added = 2 * numbers(name, seed) if "lora_B.bias" in kinds and a is not None else 0  # the scaling of `make_adapter`
    return (x @ (weight + delta).T) * scale + (numbers(name, seed) if has_bias else bias) + added


def wrong(manager: Any, *rows: tuple[Adapter | None, int, tuple[str, ...]]) -> list[str]:
    """Modules that do not compute a row of each of these adapters, in one batch, as PEFT does."""
    used = [it for it, _, _ in rows if it is not None]
    step(manager, *used)
    found = []
    for module_name, module in manager._adapter_manager.modules.items():
        if module_name.startswith("layers.1.") and "Triton" in type(module.punica_wrapper).__name__ and not IS_LONG:
            continue  # in Triton's interpreter a layer takes seconds
        x = torch.randn(len(rows), module.lora_a_stacked[0].shape[-1], generator=torch.Generator().manual_seed(1))
        base = module.base_layer
        y = base.quant_method.apply(base, x, base.bias)
        answer = y.clone()
        module.punica_wrapper.add_lora_linear(
            answer, x, module.lora_a_stacked, module.lora_b_stacked, 1.0, module.output_slices
        )
        parent, _, last = module_name.rpartition(".")
        first = 0
        for part in PACKED.get(last, [last]):
            own = slice(first, first + SHAPES[part][1])
            first = own.stop
            weight, bias = of_base(module, own)
            for number, (it, seed, kinds) in enumerate(rows):
                wanted = by_peft(it, f"{parent}.{part}", seed, kinds, weight, bias, x[number])
                if not torch.allclose(answer[number, own], wanted, atol=2e-4, rtol=2e-4):
                    found.append(f"{parent}.{part} of {number}")
    return found


DORA, B_BIAS, BIAS, IA3 = ("lora_magnitude_vector",), ("lora_B.bias",), ("bias",), ("ia3_l",)


def test_every_kind_is_computed_beside_plain_adapters(make_manager: Make, kernels: None, tmp_path: Path) -> None:
    manager = make_manager(slots=6, max_adapters=6)
    every = [(), DORA, B_BIAS, BIAS, (*DORA, *BIAS), IA3]
    made = [adapter(tmp_path, number, *kinds) for number, kinds in enumerate(every, 1)]
    for slot, it in enumerate(made):
        serve(manager, it, slot)
    batch = [(it, number, kinds) for number, (it, kinds) in enumerate(zip(made, every, strict=True), 1)]
    assert wrong(manager, *batch, batch[0]) == []


@pytest.mark.parametrize(
    ("kinds", "options"),
    [(BIAS, {"modules": {name: SHAPES[name] for name in ("q_proj", "up_proj")}}), (IA3, {})],
    ids=["modules with a bias alone", "IA3, which has no rank"],
)
def test_modules_without_a_pair(
    make_manager: Make, kernels: None, tmp_path: Path, kinds: tuple[str, ...], options: dict[str, Any]
) -> None:
    manager = make_manager()
    serve(manager, it := adapter(tmp_path, 1, *kinds, **options), 1)
    assert wrong(manager, (it, 1, kinds)) == []


def test_factors_of_a_gated_mlps_inputs_are_up_projs(make_manager: Make, tmp_path: Path) -> None:
    """Times factors of up_proj's own outputs."""
    manager = make_manager()
    inputs = {f"{PEFT}layers.{layer}.down_proj.ia3_l": torch.rand(1, 32) for layer in range(LAYERS)}
    places = {**manager._modules.places}
    for layer in range(LAYERS):
        name = f"layers.{layer}.down_proj"
        places[name] = msgspec.structs.replace(places[name], factor=f"layers.{layer}.up_proj")
    manager._modules = dataclasses.replace(manager._modules, places=places)
    serve(manager, it := adapter(tmp_path, 1, *IA3, change=inputs), 0)
    assert sorted(wrong(manager, (it, 1, IA3))) == [
        f"layers.{layer}.{name} of 0" for layer in range(LAYERS) for name in ("down_proj", "up_proj")
    ]
    for layer in range(LAYERS):
        ranks = vectors.watched_ranks(manager._adapter_manager.modules[f"layers.{layer}.gate_up_proj"])
        own = numbers(f"layers.{layer}.up_proj", 100 + MODULES.index(f"layers.{layer}.up_proj"))
        wanted = own * inputs[f"{PEFT}layers.{layer}.down_proj.ia3_l"][0]
        torch.testing.assert_close(ranks.vectors[0].g[32:], wanted)


def test_any_write_of_a_slot_takes_its_vectors_away(make_manager: Make, kernels: None, tmp_path: Path) -> None:
    manager = make_manager(slots=1, max_adapters=6)
    few = {"q_proj": SHAPES["q_proj"]}
    plain = adapter(tmp_path, 9, modules=few)
    for number, kinds in enumerate((DORA, B_BIAS, BIAS, IA3), 1):
        serve(manager, it := adapter(tmp_path, number, *kinds), 0)
        evict(manager, it)
        serve(manager, plain, 0)
        assert not any(vectors.watched_ranks(one).vectors for one in manager._adapter_manager.modules.values()), kinds
        evict(manager, plain)
    serve(manager, it := adapter(tmp_path, 5, *DORA, *BIAS), 0)
    assert wrong(manager, (it, 5, (*DORA, *BIAS))) == []
    evict(manager, it)
    serve(manager, plain, 0)
    assert wrong(manager, (plain, 9, ())) == []
    evict(manager, plain)
    manager.add_dummy_lora(plain.request(), 4)
    manager.rewrite_slots()
    assert not any(vectors.watched_ranks(one).vectors for one in manager._adapter_manager.modules.values())


def test_slots_have_their_vectors_after_memory_was_lost(make_manager: Make, kernels: None, tmp_path: Path) -> None:
    manager = make_manager()
    serve(manager, it := adapter(tmp_path, 1, *DORA), 0)
    for module in manager._adapter_manager.modules.values():
        for known in getattr(module.punica_wrapper, "_operators", SimpleNamespace(_known={}))._known.values():
            known.device_ranks.fill_(7)  # a sleep of level 2 leaves anything there, and in vectors
            known.vectors.fill_(torch.nan)
    manager.rewrite_slots()
    assert wrong(manager, (it, 1, DORA)) == []


def test_a_version_in_place_of_another_has_its_own_vectors(make_manager: Make, kernels: None, tmp_path: Path) -> None:
    manager = make_manager()
    serve(manager, adapter(tmp_path, 1, *DORA), 0)
    bring(manager, second := adapter(tmp_path, 2, *DORA))
    manager.begin_step([Move(source=2, key=1)])
    moved = Adapter(1, second.path, second.a, second.b)
    assert wrong(manager, (moved, 2, DORA)) == []


def test_norms_of_a_layer_are_asked_for_once(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manager = make_manager()
    asked: list[int] = []
    answer = row_norms._answer

    def counted(base: Any, stack: Any, x: torch.Tensor) -> Any:
        asked.append(len(x))
        return answer(base, stack, x)

    monkeypatch.setattr(row_norms, "_answer", counted)
    monkeypatch.setattr(row_norms, "_COLUMNS", 5)
    bring(manager, adapter(tmp_path, 1, *DORA))
    first, asked[:] = list(asked), []
    bring(manager, adapter(tmp_path, 2, *DORA))
    assert asked == [4] * len(MODULES), "A of each part"
    assert len(first) == len(asked) + sum(
        -(-module.lora_a_stacked[0].shape[-1] // 5) for module in manager._adapter_manager.modules.values()
    )
    assert max(first) == 5


def test_layers_are_called_in_the_engines_loop_alone(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """oneDNN's handle of a layer is no two threads'; so a step has a few milliseconds of it."""
    manager = make_manager()
    callers, steps = set(), 0
    answer = row_norms._answer

    def noted(base: Any, stack: Any, x: torch.Tensor) -> Any:
        callers.add(threading.get_ident())
        time.sleep(0.002)
        return answer(base, stack, x)

    monkeypatch.setattr(row_norms, "_answer", noted)
    load(manager, adapter(tmp_path, 1, *DORA))
    deadline, longest_s = time.monotonic() + 60, 0.0
    while manager.jobs.is_busy:
        assert time.monotonic() < deadline
        began = time.monotonic()
        manager.begin_step([])  # as beside a batch: nobody waits
        longest_s, steps = max(longest_s, time.monotonic() - began), steps + 1
        time.sleep(0.001)
    assert callers == {threading.get_ident()}
    assert steps > 5
    assert longest_s < loop_work.SHARE_S + 0.1


def test_a_load_in_the_loop_itself_waits_for_nobody(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    it = adapter(tmp_path, 1, *DORA)
    assert manager.add_adapter(it.request())
    (change,) = manager.jobs.given.take_changes(1)
    assert change.spec is not None


def test_a_worker_that_ends_leaves_no_thread_waiting(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    load(manager, adapter(tmp_path, 1, *DORA))
    while not manager.jobs.loop_work._waiting:
        time.sleep(0.001)
    manager.jobs.close()
    assert not manager.jobs._loader._thread.is_alive()


@pytest.mark.parametrize(
    ("change", "kinds", "kind", "says"),
    [
        ({f"{PEFT}layers.0.o_proj.bias": torch.ones(16)}, BIAS, IncompatibleAdapter, "a bias of 'layers.0.o_proj'"),
        ({f"{PEFT}layers.0.q_proj.{DORA[0]}": torch.ones(9)}, DORA, InvalidAdapter, r"\[9\]; expected shape \[16\]"),
        ({f"{PEFT}layers.0.norm.bias": torch.ones(9)}, BIAS, IncompatibleAdapter, "linear layers with LoRA"),
        ({f"{PEFT}layers.0.q_proj.lora_E": torch.ones(4, 1)}, (), IncompatibleAdapter, "without peft_type ADALORA"),
        ({f"{PEFT}layers.0.q_proj.{DORA[0]}": torch.full((16,), torch.nan)}, DORA, IncompatibleAdapter, "not finite"),
        ({f"{PEFT}layers.0.q_proj.bias": torch.full((16,), torch.nan)}, BIAS, IncompatibleAdapter, "not finite"),
        ({f"{PEFT}layers.0.q_proj.ia3_l": torch.full((16, 1), torch.nan)}, IA3, IncompatibleAdapter, "not finite"),
        ({f"{PEFT}layers.0.down_proj.ia3_l": torch.ones(1, 32)}, IA3, IncompatibleAdapter, "a gated MLP's down_proj"),
    ],
    ids=["no bias there", "size", "norm", "AdaLoRA", "NaN", "NaN as bias", "NaN as factor", "inputs"],
)
def test_what_a_worker_cannot_compute_is_refused(
    make_manager: Make, tmp_path: Path, change: dict[str, torch.Tensor], kinds: tuple[str, ...],
    kind: type[Exception], says: str,
) -> None:  # fmt: skip
    with pytest.raises(kind, match=says):
        raise failure(make_manager(), adapter(tmp_path, 1, *kinds, change=change))


def test_a_row_of_weights_without_a_norm_is_refused(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    it = adapter(tmp_path, 1, *DORA, change={f"{PEFT}layers.0.o_proj.lora_B.weight": torch.zeros(16, 4)})
    manager._adapter_manager.modules["layers.0.o_proj"].base_layer.weight.data[3] = 0
    assert "'layers.0.o_proj' that is not finite" in str(failure(manager, it))


def test_engines_whose_kernels_compute_no_vectors_say_so(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert make_manager()._modules.without_vectors == ""
    monkeypatch.setattr(CompiledPunicaWrapperCPU, "computes_vectors", False)
    modules: ModelModules = make_manager()._modules
    assert "lora_kernels" in modules.without_vectors
    monkeypatch.undo()


def test_workers_add_up_their_squares_at_the_first_activation(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the first of two workers, whose other part of each row has a squared norm of 7."""
    manager, exchanged = make_manager(), []

    def with_the_others(numbers: torch.Tensor) -> torch.Tensor:
        exchanged.append((len(numbers), threading.get_ident()))
        return numbers + 7

    made = vectors._LayerVectors.__init__

    def divided(self: Any, layer: Any, *args: Any) -> None:
        made(self, layer, *args)
        self._is_divided = type(layer).__name__.startswith("RowParallel")

    monkeypatch.setattr(vectors, "_sum_of_workers", with_the_others)
    monkeypatch.setattr(vectors._LayerVectors, "__init__", divided)
    it = adapter(tmp_path, 1, *DORA)
    assert isinstance(bring(manager, it), Loaded)
    assert not exchanged
    put(manager, it, 0)
    put(manager, it, 1)
    # o_proj and down_proj of both layers, in one exchange, in the loop.
    assert exchanged == [(16 * 2 * LAYERS, threading.get_ident())]
    module = manager._adapter_manager.modules["layers.0.o_proj"]
    weight = module.base_layer.weight + it.b["layers.0.o_proj"] @ it.a["layers.0.o_proj"]
    g = numbers("layers.0.o_proj", 100 + MODULES.index("layers.0.o_proj")) / (weight.square().sum(1) + 7).sqrt()
    torch.testing.assert_close(vectors.watched_ranks(module).vectors[1].g, g, rtol=1e-4, atol=1e-5)
    assert slots_of(manager)[1] == 1
