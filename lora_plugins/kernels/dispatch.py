"""Which kernels this process computes with: the setting's choice, or the best that the machine has; pure.

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
    why = f"LORA_PLUGINS_KERNELS={asked}"
    if asked is Kernels.VLLM:
        return Choice(asked, why, None)
    if asked is Kernels.TRITON:
        if machine.platform not in {"cuda", "rocm"}:
            raise _cannot(asked, f"the platform is {machine.platform}", "a GPU that Triton can compile for")
        if not machine.triton:
            raise _cannot(asked, "Triton or our Triton kernels are not installed", "both installed")
        return Choice(asked, why, TRITON_WRAPPER)
    if machine.platform != "cpu":
        raise _cannot(asked, f"the platform is {machine.platform}", "vLLM's CPU platform")
    if asked is Kernels.REFERENCE:
        return Choice(asked, why, REFERENCE_WRAPPER)
    if problem := machine.cannot_compile():
        raise _cannot(
            asked,
            problem,
            "a C compiler that works",
            remedy="repair that (install gcc), or choose vllm to keep vLLM's own kernels",
        )
    return Choice(asked, why, CPU_WRAPPER)


def _best(machine: Machine) -> Choice:
    if machine.platform == "cpu":
        if problem := machine.cannot_compile():
            return Choice(Kernels.VLLM, f"the platform is cpu, and {problem}", None)
        return Choice(Kernels.CPU, "the platform is cpu", CPU_WRAPPER)
    reason = f"the platform is {machine.platform}"
    if machine.platform != "cuda":
        return Choice(Kernels.VLLM, reason, None)
    if not machine.triton:
        return Choice(Kernels.VLLM, f"{reason}, without Triton", None)
    # Figures of other GPUs say nothing about this GPU, so `auto` keeps vLLM's kernels where we have not measured.
    architecture = machine.architecture()
    if architecture is None or not is_measured(architecture):
        reason += f", and our Triton kernels have not been measured on {architecture or 'this GPU'}"
        return Choice(Kernels.VLLM, f"{reason}; LORA_PLUGINS_KERNELS=triton takes them", None)
    return Choice(Kernels.TRITON, f"{reason}, {architecture}", TRITON_WRAPPER)


def is_measured(architecture: str) -> bool:
    """Whether the package has a tuning table for `architecture`; every table comes from measurements on a GPU."""
    return (tuning.PACKAGED / f"{architecture}.json").is_file()


def triton_is_there(find: Callable[[str], object | None] = importlib.util.find_spec) -> bool:
    """Whether Triton and our wrapper are installed; imports neither."""
    return find("triton") is not None and find("lora_plugins.kernels.punica_triton") is not None


def base_rows_get_an_adapter(lora_ops: str) -> bool:
    """Whether vLLM's CPU kernels compute base-model rows with an adapter; `lora_ops` is the source of its torch_ops."""
    # 0.33 masks index -1, which stands for "no adapter"; before, it selects the last slot.
    named = (node for node in ast.parse(lora_ops).body if isinstance(node, ast.FunctionDef))
    kernel = next((node for node in named if node.name == "bgmv_shrink"), None)
    return kernel is not None and "-1" not in (ast.get_source_segment(lora_ops, kernel) or "-1")


def _cannot(
    asked: Kernels, found: str, expected: str, remedy: str = "choose auto, or vllm to keep vLLM's own kernels"
) -> InvalidSettings:
    return InvalidSettings(f"LORA_PLUGINS_KERNELS={asked}, but {found}", expected=expected, remedy=remedy)
