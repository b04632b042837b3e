"""The entry point in a real vLLM process: what a server with it has, and that one without it has vLLM's own."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
import vllm.platforms
from vllm.lora.ops.torch_ops import lora_ops
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from lora_plugins.kernels.compiled import build
from lora_plugins.vllm_patches.worker import punica_wrapper
from testbed.forking_vllm import run_script
from testbed.server import outer_environment

SCRIPT = """
import json, os, sys
from lora_plugins.kernels.compiled import build
from vllm.config import LoRAConfig, VllmConfig
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
original = BaseLayerWithLoRA.set_mapping
for kept in (build.problem, build.product, build._of_wheel):
    kept.cache_clear()  # of the process that this one is forked from
for line in sys.argv[1:]:
    sys.stdout.flush()
    if not os.fork():
        os.environ.update(json.loads(line))
        error = ""
        try:
            load_general_plugins()
            from lora_plugins import plugin
            plugin.register_kernels()  # again: the same process may load plugins twice
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        wrapped = BaseLayerWithLoRA.set_mapping
        print(json.dumps({
            "products": build.product.cache_info().misses,
            "wrapper": current_platform.get_punica_wrapper(),
            "untouched": wrapped is original,
            "wrapped_once": getattr(wrapped, "__wrapped__", None) is original,
            "error": error,
            "hash": VllmConfig(lora_config=LoRAConfig(lora_dtype="float16")).compute_hash(),
        }), flush=True)
        os._exit(0)
    os.wait()
"""
ENVIRONMENTS = {
    "manager": {"VLLM_PLUGINS": "lora_lru_manager"},
    "named": {"VLLM_PLUGINS": "lora_kernels"},
    "others": {"VLLM_PLUGINS": "lora_filesystem_resolver"},
    "all": {},
    "named, reference": {"VLLM_PLUGINS": "lora_kernels", "LORA_PLUGINS_KERNELS": "reference"},
    "named, without a compiler": {"VLLM_PLUGINS": "lora_kernels", "PATH": ""},
    "named, vllm": {"VLLM_PLUGINS": "lora_kernels", "LORA_PLUGINS_KERNELS": "vllm"},
    "named, triton": {"VLLM_PLUGINS": "lora_kernels", "LORA_PLUGINS_KERNELS": "triton"},
}
VLLMS_OWN = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
OURS = "lora_plugins.kernels.punica_cpu."


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    cases = map(json.dumps, ENVIRONMENTS.values())
    done = run_script(SCRIPT, *cases, environment=outer_environment(), home=tmp_path_factory.mktemp("outcomes"))
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(ENVIRONMENTS), done.stderr[-4000:]
    return dict(zip(ENVIRONMENTS, results, strict=True))


@pytest.mark.parametrize(
    ("env", "wrapper"),
    [
        pytest.param(
            "named",
            OURS + "CompiledPunicaWrapperCPU",
            marks=pytest.mark.skipif(
                build.problem() is not None, reason=f"{build.problem()}: then vLLM's kernels compute"
            ),
        ),
        ("named, reference", OURS + "ReferencePunicaWrapper"),
    ],
)
def test_our_wrapper_is_made_where_the_plugin_is_named(outcomes, env, wrapper):
    wanted = {"wrapper": wrapper, "untouched": False, "wrapped_once": True, "error": ""}
    assert outcomes[env] == {**wanted, "products": 0, "hash": ANY}


@pytest.mark.parametrize("env", ["others", "all", "named, vllm", "named, without a compiler"])
def test_elsewhere_vllm_is_as_without_us(outcomes, env):
    wanted = {"wrapper": VLLMS_OWN, "untouched": True, "wrapped_once": False, "error": ""}
    assert outcomes[env] == {**wanted, "products": 0, "hash": outcomes["others"]["hash"]}


def test_hooks_of_the_manager_have_compiled_models_of_their_own(outcomes):
    """Such a model has the search for rows of trained tokens."""
    assert outcomes["manager"]["wrapper"] == VLLMS_OWN
    assert outcomes["manager"]["hash"] != outcomes["others"]["hash"]


def test_each_wrapper_has_compiled_models_of_its_own(outcomes):
    """vLLM keeps compiled models by this hash, and they call the operators of the wrapper that they were made for."""
    of_wrapper = {outcome["wrapper"]: outcome["hash"] for outcome in outcomes.values()}
    assert len(of_wrapper) > 1
    assert len(set(of_wrapper.values())) == len(of_wrapper)


def test_startup_fails_with_kernels_that_cannot_be_had(outcomes):
    outcome = outcomes["named, triton"]
    assert outcome["error"].startswith("InvalidSettings: [L007]")
    assert "platform is cpu" in outcome["error"]
    assert outcome["untouched"]


def test_base_rows_that_vllm_gives_an_adapter_are_noticed():
    weights, y = torch.ones(2, 1, 4, 8), torch.zeros(1, 4)
    lora_ops.bgmv_shrink(torch.ones(1, 8), weights, y, torch.tensor([-1]))
    assert punica_wrapper.base_rows_get_an_adapter() == bool(y.any())


@pytest.mark.parametrize(
    ("module", "platform", "name"), [("cpu", "CpuPlatform", "cpu"), ("rocm", "RocmPlatform", "rocm")]
)
def test_rocm_is_told_from_cuda(module, platform, name):
    """Its `device_type` is "cuda" as well. The class is read without being imported, since it wants a ROCm driver."""
    source = Path(vllm.platforms.__file__).with_name(f"{module}.py").read_text()
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == platform)
    values = {
        node.targets[0].id if isinstance(node, ast.Assign) else node.target.id: ast.unparse(node.value)
        for node in body.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
    }

    class Here(Platform):
        _enum = PlatformEnum[values["_enum"].removeprefix("PlatformEnum.")]
        device_type = ast.literal_eval(values["device_type"])

    assert punica_wrapper.platform_name(Here()) == name


def test_an_architecture_is_called_as_its_tuning_table():
    class Hopper(Platform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

    assert punica_wrapper.architecture(Hopper()) == "sm_90"
    assert punica_wrapper.architecture(Platform()) is None
