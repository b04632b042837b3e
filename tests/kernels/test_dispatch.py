"""Which kernels: an explicit choice or none, and `auto` says why."""

from __future__ import annotations

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.kernels.dispatch import CPU_WRAPPER, REFERENCE_WRAPPER, Kernels, Machine, choose, triton_is_there

TRITON = "lora_plugins.kernels.punica_triton.TritonPunicaWrapper"


@pytest.mark.parametrize(
    ("asked", "machine", "kernels", "wrapper"),
    [
        ("auto", Machine("cpu", triton=False), "cpu", CPU_WRAPPER),
        ("auto", Machine("cpu", triton=True), "cpu", CPU_WRAPPER),
        ("auto", Machine("cuda", triton=True), "triton", TRITON),
        ("auto", Machine("cuda", triton=False), "vllm", None),
        ("auto", Machine("tpu", triton=True), "vllm", None),
        ("cpu", Machine("cpu", triton=False), "cpu", CPU_WRAPPER),
        ("reference", Machine("cpu", triton=False), "reference", REFERENCE_WRAPPER),
        ("triton", Machine("cuda", triton=True), "triton", TRITON),
        ("vllm", Machine("cuda", triton=True), "vllm", None),
    ],
)
def test_what_is_taken(asked, machine, kernels, wrapper):
    choice = choose(Kernels(asked), machine)
    assert (choice.kernels, choice.wrapper) == (kernels, wrapper)
    assert (machine.platform if asked == "auto" else f"LORA_PLUGINS_KERNELS={asked}") in choice.why


@pytest.mark.parametrize(
    ("asked", "machine", "says"),
    [
        ("cpu", Machine("cuda", triton=True), "platform is cuda"),
        ("reference", Machine("cuda", triton=True), "platform is cuda"),
        ("triton", Machine("cpu", triton=True), "platform is cpu"),
        ("triton", Machine("cuda", triton=False), "not installed"),
    ],
)
def test_what_cannot_be_had_ends_the_start(asked, machine, says):
    with pytest.raises(InvalidSettings, match=f"LORA_PLUGINS_KERNELS={asked}.*{says}"):
        choose(Kernels(asked), machine)


@pytest.mark.parametrize(("installed", "there"), [({"triton"}, False), (set(), False)])
def test_triton_needs_the_compiler_and_our_wrapper(installed, there):
    assert triton_is_there(lambda name: name if name in installed else None) is there


def test_triton_is_there_with_both():
    assert triton_is_there(lambda name: name)
