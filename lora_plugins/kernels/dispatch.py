"""Which kernels this process computes with: the setting's choice, or the best that the machine has; pure.

Each process of a server asks once at start, before vLLM makes a model's layers
(`vllm_patches/worker/punica_wrapper.py`); `lora-plugins doctor` asks too. In go `LORA_PLUGINS_KERNELS` and facts about
the machine, out comes the dotted name of a punica wrapper: vLLM's class whose methods compute LoRA for all layers.

An explicit choice that the machine cannot have fails at startup. Only `auto` chooses, and logs its choice and the
reason. There is no fallback after an error: a kernel that fails, fails.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from lora_plugins.errors import InvalidSettings
from lora_plugins.kernels import tuning
from lora_plugins.kernels.compiled import build
from lora_plugins.settings import Kernels

# Dotted names: vLLM imports the class by name, and only the chosen platform's module is importable.
CPU_WRAPPER = "lora_plugins.kernels.punica_cpu.CompiledPunicaWrapperCPU"
REFERENCE_WRAPPER = "lora_plugins.kernels.punica_cpu.ReferencePunicaWrapper"
TRITON_WRAPPER = "lora_plugins.kernels.punica_triton.TritonPunicaWrapper"
_WRAPPERS = {Kernels.CPU: CPU_WRAPPER, Kernels.REFERENCE: REFERENCE_WRAPPER, Kernels.TRITON: TRITON_WRAPPER}


def are_pointed(dtype: object, *, fully_sharded: bool) -> bool:
    """Whether slots of this dtype point at packed weights, where the compiled product computes.

    Fully sharded layers, which shrink and expand apart, have their weights copied.
    """
    return str(dtype).removeprefix("torch.") in build.ELEMENTS and not fully_sharded


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about the machine that decide the choice.

    Attributes:
        platform: vLLM's name: `cpu`, `cuda`, `rocm`, ...
        triton: whether Triton and our ops for Triton are installed.
        cannot_compile: returns why there is no compiled CPU product, or None; called only if the choice depends on it.
        architecture: returns the GPU's architecture, such as `sm_90`; called only if the choice depends on it.
    """

    platform: str
    triton: bool
    cannot_compile: Callable[[], str | None] = lambda: None
    architecture: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels taken, why, and the dotted name of their punica wrapper: None leaves vLLM's own in place."""

    kernels: Kernels
    why: str
    wrapper: str | None


def choose(asked: Kernels, machine: Machine) -> Choice:
    """Return the kernels for this machine.

    Raises:
        InvalidSettings: the machine cannot have the kernels that the setting names.
    """
    if asked is Kernels.AUTO:
        return _best(machine)
    if (lack := _lack(asked, machine)) is not None:
        found, expected = lack
        needs_compiler = asked is Kernels.CPU and machine.platform == "cpu"
        repair = "repair that (install gcc), or choose" if needs_compiler else "choose auto, or"
        raise InvalidSettings(
            f"LORA_PLUGINS_KERNELS={asked}, but {found}",
            expected=expected,
            remedy=f"{repair} vllm to keep vLLM's own kernels",
        )
    return Choice(asked, f"LORA_PLUGINS_KERNELS={asked}", _WRAPPERS.get(asked))


def _lack(asked: Kernels, machine: Machine) -> tuple[str, str] | None:
    """Return what keeps the machine from these kernels, and what the kernels need; None where nothing does."""
    if asked is Kernels.TRITON and machine.platform not in {"cuda", "rocm"}:
        return f"the platform is {machine.platform}", "a GPU that Triton can compile for"
    if asked is Kernels.TRITON and not machine.triton:
        return "Triton or our Triton kernels are not installed", "both installed"
    if asked in {Kernels.CPU, Kernels.REFERENCE} and machine.platform != "cpu":
        return f"the platform is {machine.platform}", "vLLM's CPU platform"
    if asked is Kernels.CPU and (problem := machine.cannot_compile()):
        return problem, "a C compiler that works"
    return None


def _best(machine: Machine) -> Choice:
    why = f"the platform is {machine.platform}"
    if machine.platform == "cpu":
        if problem := machine.cannot_compile():
            return Choice(Kernels.VLLM, f"{why}, and {problem}", None)
        return Choice(Kernels.CPU, why, CPU_WRAPPER)
    if machine.platform != "cuda":
        return Choice(Kernels.VLLM, why, None)
    if not machine.triton:
        return Choice(Kernels.VLLM, f"{why}, without Triton", None)
    # Figures of other GPUs say nothing about this GPU: without a tuning table of its architecture we have not measured.
    architecture = machine.architecture()
    if architecture is None or not (tuning.PACKAGED / f"{architecture}.json").is_file():
        why += f", and our Triton kernels have not been measured on {architecture or 'this GPU'}"
        return Choice(Kernels.VLLM, f"{why}; LORA_PLUGINS_KERNELS=triton takes them", None)
    return Choice(Kernels.TRITON, f"{why}, {architecture}", TRITON_WRAPPER)


def triton_is_there(find: Callable[[str], object | None] = importlib.util.find_spec) -> bool:
    """Whether Triton and our wrapper are installed; imports neither."""
    return find("triton") is not None and find("lora_plugins.kernels.punica_triton") is not None


def base_rows_get_an_adapter(lora_ops: str) -> bool:
    """Whether vLLM's CPU kernels compute base-model rows with an adapter; `lora_ops` is the source of its torch_ops."""
    # 0.33 masks index -1, which stands for "no adapter"; before, it selects the last slot.
    named = (node for node in ast.parse(lora_ops).body if isinstance(node, ast.FunctionDef))
    kernel = next((node for node in named if node.name == "bgmv_shrink"), None)
    return kernel is not None and "-1" not in (ast.get_source_segment(lora_ops, kernel) or "-1")
