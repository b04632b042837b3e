"""Which kernels: an explicit choice or none, and `auto` says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.kernels import dispatch
from lora_plugins.kernels.dispatch import (
    CPU_WRAPPER,
    REFERENCE_WRAPPER,
    Kernels,
    Machine,
    choose,
    triton_is_there,
)
from lora_plugins.kernels.tuning import PACKAGED

NO_COMPILER = "no C compiler is on the PATH"
TRITON = "lora_plugins.kernels.punica_triton.TritonPunicaWrapper"


@pytest.mark.parametrize(
    ("asked", "machine", "kernels", "wrapper"),
    [
        ("auto", Machine("cpu", triton=False), "cpu", CPU_WRAPPER),
        ("auto", Machine("cpu", triton=True), "cpu", CPU_WRAPPER),
        ("auto", Machine("cuda", triton=True, architecture=lambda: "sm_90"), "vllm", None),
        ("auto", Machine("cuda", triton=True), "vllm", None),
        ("auto", Machine("cuda", triton=False), "vllm", None),
        ("auto", Machine("rocm", triton=True, architecture=lambda: "sm_90"), "vllm", None),
        ("auto", Machine("tpu", triton=True), "vllm", None),
        ("cpu", Machine("cpu", triton=False), "cpu", CPU_WRAPPER),
        ("auto", Machine("cpu", triton=False, cannot_compile=lambda: NO_COMPILER), "vllm", None),
        ("reference", Machine("cpu", triton=False), "reference", REFERENCE_WRAPPER),
        ("triton", Machine("cuda", triton=True), "triton", TRITON),
        ("triton", Machine("rocm", triton=True), "triton", TRITON),
        ("vllm", Machine("cuda", triton=True), "vllm", None),
    ],
)
def test_what_is_taken(asked, machine, kernels, wrapper):
    choice = choose(Kernels(asked), machine)
    assert (choice.kernels, choice.wrapper) == (kernels, wrapper)
    assert (NO_COMPILER in choice.why) is (asked == "auto" and machine.cannot_compile() is not None)
    assert (machine.platform if asked == "auto" else f"LORA_PLUGINS_KERNELS={asked}") in choice.why


@pytest.mark.parametrize(
    ("platform", "architecture", "kernels"),
    [("cuda", "sm_90", "triton"), ("cuda", "sm_80", "vllm"), ("cuda", None, "vllm"), ("rocm", "sm_90", "vllm")],
)
def test_auto_takes_triton_only_where_a_gpu_measured_it(platform, architecture, kernels, tmp_path, monkeypatch):
    (tmp_path / "sm_90.json").write_text("{}")
    monkeypatch.setattr(dispatch.tuning, "PACKAGED", tmp_path)
    choice = choose(Kernels.AUTO, Machine(platform, triton=True, architecture=lambda: architecture))
    assert choice.kernels == kernels
    if platform == "cuda" and kernels == "vllm":
        assert "have not been measured" in choice.why
        assert "LORA_PLUGINS_KERNELS=triton" in choice.why


def test_packaged_tables_of_architectures_have_results_measured_with_them():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    measured = {json.loads(path.read_text())["table"] for path in results.glob("kernels_gpu*.json")}
    assert {path.name for path in PACKAGED.glob("sm_*.json")} <= measured


@pytest.mark.parametrize(
    ("asked", "machine", "says"),
    [
        ("cpu", Machine("cuda", triton=True), "platform is cuda"),
        ("cpu", Machine("cpu", triton=True, cannot_compile=lambda: NO_COMPILER), f"{NO_COMPILER}.*install gcc"),
        ("reference", Machine("cuda", triton=True), "platform is cuda"),
        ("triton", Machine("cpu", triton=True), "platform is cpu"),
        ("triton", Machine("cuda", triton=False), "not installed"),
    ],
)
def test_startup_fails_with_kernels_that_cannot_be_had(asked, machine, says):
    with pytest.raises(InvalidSettings, match=f"LORA_PLUGINS_KERNELS={asked}.*{says}"):
        choose(Kernels(asked), machine)


@pytest.mark.parametrize(("installed", "there"), [({"triton"}, False), (set(), False)])
def test_triton_needs_the_compiler_and_our_wrapper(installed, there):
    assert triton_is_there(lambda name: name if name in installed else None) is there


def test_triton_is_there_with_both():
    assert triton_is_there(lambda name: name)


@pytest.mark.parametrize("asked", ["reference", "vllm"])
def test_nothing_is_compiled_unless_the_choice_needs_it(asked):
    asked_for = []
    choose(Kernels(asked), Machine("cpu", triton=False, cannot_compile=lambda: asked_for.append(1)))
    assert asked_for == []
