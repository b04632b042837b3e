"""A small real model of vLLM's own layers on the CPU, adapters for it, and what its slots should hold for each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.scheduler.messages import Activate, Activated, AdapterSpec, Evict, Failed, Load, Loaded, Report
from lora_plugins.settings import Settings
from testbed.model_kinds import ask_in_this_process

Make = Callable[..., Any]  # the fixtures that make managers

WIDTH, HIGH, LAYERS, MAX_RANK = 16, 32, 2, 8
# The adapter's modules: features in, features out.
ATTENTION = {"q_proj": (WIDTH, WIDTH), "k_proj": (WIDTH, 8), "v_proj": (WIDTH, 8), "o_proj": (WIDTH, WIDTH)}
MLP = {"gate_proj": (WIDTH, HIGH), "up_proj": (WIDTH, HIGH), "down_proj": (HIGH, WIDTH)}
MORE = {"column": (WIDTH, WIDTH), "replicated": (WIDTH, WIDTH)}
SHAPES = ATTENTION | MLP | MORE
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def base_directory(directory: Path) -> Path:
    """The configuration of a base model; it has no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": HIGH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@contextmanager
def one_process(rendezvous: Path) -> Iterator[None]:
    """What vLLM's layers ask of torch.distributed, with a world of this process alone, on the loopback."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():  # by tests of another folder, which ran in this process before
        yield
        return
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def vllm_config(base: Path, *, slots: int = 2, max_adapters: int = 4) -> Any:
    from vllm.config import LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig

    ask_in_this_process()
    model = ModelConfig(str(base), skip_tokenizer_init=True, dtype="float32", max_model_len=64)
    lora = LoRAConfig(max_lora_rank=MAX_RANK, max_loras=slots, max_cpu_loras=max_adapters, lora_dtype=torch.float32)
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=64, is_encoder_decoder=False)
    return VllmConfig(model_config=model, lora_config=lora, scheduler_config=scheduler)


def small_model() -> Any:
    """Two layers with one of each of vLLM's linear layers."""
    from torch import nn
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.models.interfaces import SupportsLoRA

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = QKVParallelLinear(WIDTH, 8, 2, 1, bias=False)
            self.o_proj = RowParallelLinear(WIDTH, WIDTH, bias=False)
            self.gate_up_proj = MergedColumnParallelLinear(WIDTH, [HIGH, HIGH], bias=False)
            self.down_proj = RowParallelLinear(HIGH, WIDTH, bias=False)
            self.column = ColumnParallelLinear(WIDTH, WIDTH, bias=False)
            self.replicated = ReplicatedLinear(WIDTH, WIDTH, bias=False)

    class SmallModel(nn.Module, SupportsLoRA):
        packed_modules_mapping = PACKED
        embedding_modules: ClassVar[dict[str, str]] = {}

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.config = None

    return SmallModel()


def manager_of(config: Any, kind: type | None = None, device: Any = None) -> Any:
    """A worker manager over a model of its own; ours, or vLLM's `kind`. Without a `device`, the CPU's."""
    from lora_plugins.worker.manager import PlannedWorkerLoRAManager

    make = kind or functools.partial(PlannedWorkerLoRAManager, settings=Settings.from_env())
    manager = make(config, device or torch.device("cpu"), {})
    manager.create_lora_manager(small_model(), config)
    return manager


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter on disk and, by module and side, what should be computed with: scaling folded in, as float32."""

    adapter_id: int
    path: Path
    a: dict[str, torch.Tensor]
    b: dict[str, torch.Tensor]
    is_3d: bool = False

    @property
    def name(self) -> str:
        return f"adapter-{self.adapter_id}"

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for side in (self.a, self.b) for tensor in side.values())

    @property
    def rank(self) -> int:
        """The largest of its modules'."""
        return max(side.shape[0] for side in self.a.values())

    @property
    def spec(self) -> AdapterSpec:
        return AdapterSpec(self.adapter_id, self.name, str(self.path))

    def request(self, **changes: Any) -> Any:
        from vllm.lora.request import LoRARequest

        fields = {"lora_path": str(self.path), "is_3d_lora_weight": self.is_3d, **changes}
        return LoRARequest(lora_name=self.name, lora_int_id=self.adapter_id, **fields)

    def vanish(self) -> None:
        shutil.rmtree(self.path)


def make_adapter(
    directory: Path,
    adapter_id: int,
    *,
    rank: int = 4,
    seed: int | None = None,
    modules: dict[str, tuple[int, int]] = SHAPES,
    prefix: str = "layers.{}.",
    dtype: torch.dtype = torch.float32,
    change: dict[str, torch.Tensor] | None = None,
    drop: Sequence[str] = (),
    **fields: Any,
) -> Adapter:
    """Write an adapter as PEFT would, with these `fields` of its configuration.

    `change` replaces and `drop` leaves out tensors by their PEFT names.
    """
    generator = torch.Generator().manual_seed(adapter_id if seed is None else seed)
    names = [prefix.format(layer) + name for layer in range(LAYERS) for name in modules]
    tensors: dict[str, torch.Tensor] = {}
    a, b = {}, {}
    for name in names:
        wide, high = modules[name.rsplit(".", 1)[-1]]
        a[name] = torch.randn(rank, wide, generator=generator).to(dtype)
        b[name] = torch.randn(high, rank, generator=generator).to(dtype)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a[name]
        tensors[f"base_model.model.{name}.lora_B.weight"] = b[name]
    tensors |= change or {}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in names}),
        "base_model_name_or_path": "org/small",
        **fields,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return Adapter(
        adapter_id,
        directory,
        {name: tensor.float() for name, tensor in a.items()},
        {name: 2 * tensor.float() for name, tensor in b.items()},
    )


def differences(manager: Any, index: int, adapter: Adapter) -> list[str]:
    """Names of the modules whose slot `index` does not hold exactly this adapter, zeros around it."""
    wrong = []
    for module_name, module in manager._adapter_manager.modules.items():
        parent, _, last = module_name.rpartition(".")
        for slice_index, part in enumerate(PACKED.get(last, [last])):
            name = f"{parent}.{part}"
            for stacked, sides in ((module.lora_a_stacked, adapter.a), (module.lora_b_stacked, adapter.b)):
                held = stacked[slice_index][index, 0]
                wanted = torch.zeros_like(held)
                side = sides.get(name)
                if side is not None:
                    wanted[: side.shape[0], : side.shape[1]] = side
                if not torch.equal(held, wanted):
                    wrong.append(name)
    return wrong


class Blocked:
    """Holds up whoever calls `set_lora` of one module of a manager, until `go`; counts the calls.

    Only calls from other threads than the one that made it are held up.
    """

    def __init__(self, manager: Any) -> None:
        self._module = next(iter(manager._adapter_manager.modules.values()))
        self._set_lora = self._module.set_lora
        self._me = threading.current_thread()
        self.entered, self.go = threading.Event(), threading.Event()
        self._module.set_lora = self._wait_first

    def _wait_first(self, *args: Any) -> Any:
        if threading.current_thread() is not self._me:
            self.entered.set()
            assert self.go.wait(60)
        return self._set_lora(*args)

    def end(self) -> None:
        self.go.set()
        self._module.set_lora = self._set_lora


# --- what the scheduler and the engine do with a worker manager ---

_numbers = itertools.count(1)


def load(manager: Any, adapter: Adapter) -> int:
    """Have it loaded; returns the job's number."""
    job = next(_numbers)
    manager.begin_step([Load(adapter.spec, adapter.adapter_id, job)])
    return job


def activate(manager: Any, adapter: Adapter, slot: int) -> int:
    """Have it written into a slot in the background; returns the job's number."""
    job = next(_numbers)
    manager.begin_step([Activate(adapter.adapter_id, slot, job)])
    return job


def evict(manager: Any, adapter: Adapter) -> None:
    manager.begin_step([Evict(adapter.adapter_id)])


def ended(manager: Any, job: int, timeout_s: float = 60) -> Report:
    """The last that is reported of a job, once nothing is on its way."""
    deadline, reports = time.monotonic() + timeout_s, []
    while manager.jobs.is_busy:
        assert time.monotonic() < deadline, f"job {job} has not ended"
        reports += manager.reports(0.1)
    reports += manager.reports()
    return [report for report in reports if report.job == job][-1]


def bring(manager: Any, adapter: Adapter) -> Report:
    """Load it; returns the end of it."""
    return ended(manager, load(manager, adapter))


def failure(manager: Any, adapter: Adapter) -> LoRAPluginsError:
    """Have it loaded, which must fail; returns the error."""
    report = bring(manager, adapter)
    assert isinstance(report, Failed), report
    return report.error


def put(manager: Any, adapter: Adapter, slot: int) -> None:
    """Put a loaded adapter into a slot, in the way in which the scheduler would."""
    if manager.jobs.entries[adapter.adapter_id].adapter.is_instant:
        manager.begin_step([Activate(adapter.adapter_id, slot)])
    else:
        assert isinstance(ended(manager, activate(manager, adapter, slot)), Activated)


def serve(manager: Any, adapter: Adapter, slot: int) -> None:
    """Load it and put it into a slot, with whatever kernels."""
    report = bring(manager, adapter)
    assert isinstance(report, Loaded), report
    put(manager, adapter, slot)


def step(manager: Any, *adapters: Adapter) -> None:
    """What the engine does before a forward pass with these adapters, one token for each."""
    from vllm.lora.layers import LoRAMapping

    ids = tuple(adapter.adapter_id for adapter in adapters) or (0,)
    manager.set_active_adapters({adapter.request() for adapter in adapters}, LoRAMapping(ids, ids, is_prefill=True))


def slots_of(manager: Any) -> list[int | None]:
    return list(manager._adapter_manager.lora_index_to_id)


def holds(manager: Any, *adapters: Adapter) -> bool:
    """Whether each adapter is in a slot, and that slot holds it and nothing else."""
    slots = slots_of(manager)
    return not any(differences(manager, slots.index(adapter.adapter_id), adapter) for adapter in adapters)


def runs(manager: Any, *adapters: Adapter) -> bool:
    """Prepare a batch of these adapters; returns whether their slots hold them."""
    step(manager, *adapters)
    return holds(manager, *adapters)


def punica_indices(manager: Any) -> list[int]:
    """The slot of each token of the batch that was prepared last."""
    wrapper = next(iter(manager._adapter_manager.punica_wrapper_mapping.values()))
    return wrapper.token_lora_indices.tolist()


def wrong_answers(manager: Any, *adapters: Adapter) -> list[str]:
    """Modules that do not compute a row of each of these adapters, in one batch, as they should."""
    step(manager, *adapters)
    generator, wrong = torch.Generator().manual_seed(0), []
    for module_name, module in manager._adapter_manager.modules.items():
        parent, _, last = module_name.rpartition(".")
        x = torch.randn(len(adapters), module.lora_a_stacked[0].shape[-1], generator=generator)
        before = torch.randn(len(adapters), sum(module.output_slices), generator=generator)
        y, wanted = before.clone(), before.clone()
        stacks = module.lora_a_stacked, module.lora_b_stacked
        module.punica_wrapper.add_lora_linear(y, x, *stacks, 1.0, module.output_slices)
        first = 0
        for part, width in zip(PACKED.get(last, [last]), module.output_slices, strict=True):
            for row, adapter in enumerate(adapters):
                if (a := adapter.a.get(f"{parent}.{part}")) is not None:
                    wanted[row, first : first + width] += adapter.b[f"{parent}.{part}"] @ (a @ x[row])
            first += width
        if not torch.allclose(y, wanted, rtol=1e-4, atol=1e-3):
            wrong.append(module_name)
    return wrong


def use_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have managers that are made from now on compute with our compiled kernels, which slots are only pointed at."""
    from lora_plugins.kernels.compiled import build
    from lora_plugins.kernels.dispatch import CPU_WRAPPER

    if build.problem():
        pytest.skip(f"{build.problem()}: then slots are copied into")
    use_kernels(monkeypatch, CPU_WRAPPER)


def use_kernels(monkeypatch: pytest.MonkeyPatch, wrapper: str) -> None:
    """Have managers that are made from now on compute with the punica wrapper of this dotted name."""
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.platforms import current_platform

    from lora_plugins.vllm_patches.worker.punica_wrapper import register_layers

    monkeypatch.setattr(type(current_platform), "get_punica_wrapper", classmethod(lambda _: wrapper))
    monkeypatch.setattr(BaseLayerWithLoRA, "set_mapping", BaseLayerWithLoRA.set_mapping)  # to be put back
    monkeypatch.setattr(LoRAModelManager, "activate_adapter", LoRAModelManager.activate_adapter)
    register_layers()
