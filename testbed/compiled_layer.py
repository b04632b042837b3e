"""A LoRA layer in a model that vLLM compiles and keeps in its compile cache, as on CUDA, in Triton's interpreter.

    python -m testbed.compiled_layer CACHE KERNELS [CACHE KERNELS ...]

Each pair is a start with these kernels (vllm, triton or triton-in-vllms-cache) over this cache, in a process of its
own, forked from one that has imported vLLM. Prints in a line each whether the compiled model came from the cache, and
whether the adapter's row and the base model's row are right; or null, where the start has failed.
`triton-in-vllms-cache` computes with our kernels under vLLM's own hash, as an old cache would be found.

vLLM's operators want a machine with a GPU: Triton gets an entry for CPUs, whose driver nobody asks for, and one of
vLLM's passes, which names operators of CUDA builds only, is left out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from types import SimpleNamespace
from typing import NoReturn, TextIO

RANK, WIDTH, ROWS = 16, 64, 4
GPU_WRAPPER = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"


def take_kernels(kernels: str) -> None:
    """What `vllm_patches.worker.punica_wrapper.patch` does on a GPU."""
    from vllm.config import LoRAConfig
    from vllm.platforms import current_platform

    from lora_plugins.kernels.dispatch import TRITON_WRAPPER
    from lora_plugins.vllm_patches.worker import punica_wrapper

    type(current_platform).get_punica_wrapper = classmethod(lambda _: GPU_WRAPPER)
    vllms_hash = LoRAConfig.compute_hash
    if kernels != "vllm":
        punica_wrapper.use_wrapper(TRITON_WRAPPER)
    if kernels == "triton-in-vllms-cache":
        LoRAConfig.compute_hash = vllms_hash


def main() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_AOT_COMPILE": "1"}  # Triton reads its variable when imported
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    import vllm.lora.layers
    import vllm.model_executor.layers.linear  # noqa: F401 - so that the starts have it

    for cache, kernels in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        if not (child := os.fork()):
            start(cache, kernels, answers)
        if os.waitpid(child, 0)[1]:
            print("null", file=answers, flush=True)


def start(cache: str, kernels: str, answers: TextIO) -> NoReturn:
    os.environ["VLLM_CACHE_ROOT"] = cache
    status = 1
    try:
        take_kernels(kernels)
        print(json.dumps(compute()), file=answers, flush=True)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def compute() -> dict[str, object]:
    import torch
    from vllm.compilation.counter import compilation_counter
    from vllm.compilation.decorators import support_torch_compile
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationConfig, CompilationMode, LoRAConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.forward_context import set_forward_context
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.utils import from_layer
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    FixFunctionalizationPass.__call__ = lambda *_: None
    lora = LoRAConfig(max_lora_rank=RANK, max_loras=2, max_cpu_loras=2, lora_dtype=torch.float16)
    config = VllmConfig(lora_config=lora)
    # Afterwards: on the CPU a configuration with LoRA never compiles.
    config.compilation_config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        backend="inductor",
        custom_ops=["none"],
        splitting_ops=[],
        cudagraph_mode="NONE",
        compile_sizes=[],
        compile_ranges_endpoints=[32],
    )

    class Model(torch.nn.Module):
        def __init__(self, *, vllm_config: object, prefix: str = "", layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    with set_current_vllm_config(config), torch.inference_mode(), tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.manual_seed(0)
        base = ReplicatedLinear(WIDTH, WIDTH, bias=False, params_dtype=torch.float16)
        torch.nn.init.normal_(base.weight, std=0.2)
        base.quant_method.process_weights_after_loading(base)
        layer = from_layer(base, 2, lora, ["g"])
        wrapper = resolve_obj_by_qualname(current_platform.get_punica_wrapper())(32, 4, "cpu", lora_config=lora)
        layer.set_mapping(wrapper)
        a, b = torch.randn(RANK, WIDTH) / 8, torch.randn(WIDTH, RANK)
        layer.set_lora(0, a.half(), b.half())
        model = support_torch_compile(dynamic_arg_dims={"x": 0})(Model)(vllm_config=config, layer=layer)
        ids = (7, 7, 0, 0)
        wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [7, None], 3, 100)
        x = torch.randn(ROWS, WIDTH).half()
        with set_forward_context(None, config):
            y = model(x)
        plain = base(x)[0].float()
        adapted = plain + x.float() @ a.half().float().T @ b.half().float().T
        return {
            "from_cache": bool(compilation_counter.num_aot_artifacts_loaded),
            "adapted_row": bool((y[0].float() - adapted[0]).abs().max() < 0.1),
            "base_row": bool((y[2].float() - plain[2]).abs().max() < 0.1),
        }


if __name__ == "__main__":
    main()
