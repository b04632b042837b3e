"""LoRA layers in a model that vLLM compiles in pieces and keeps in its cache, as on CUDA, in Triton's interpreter.

    python -m testbed.compiled_layer CACHE KERNELS [CACHE KERNELS ...]

Each pair is a start with these kernels (vllm, triton or triton-in-vllms-cache) over this cache, in a process of its
own, forked from one that has imported vLLM. Prints in a line each whether the compiled model came from the cache, how
many pieces vLLM saw, and for each of `BATCHES` whether the rows are right; or null, where the start has failed.
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

RANK, WIDTH = 16, 64
# The adapter of each row, 0 for none, and the ranks that are written into slots before: by slot. vLLM compiles with a
# batch without adapters; whatever a compiled piece would keep of that, a later batch contradicts.
BATCHES = (
    ((0, 0, 0), {}),
    ((7, 7, 0, 0), {0: 16}),
    ((9, 7, 0, 9, 9, 7), {0: 4, 1: 11}),
    ((9, 9, 9, 9, 9), {}),
    ((0, 9, 7, 0), {1: 16}),
)
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
        splitting_ops=["testbed::attention"],
        cudagraph_mode="NONE",
        compile_sizes=[],
        compile_ranges_endpoints=[32],
    )

    # In the place of attention, at which vLLM cuts a model into pieces.
    library = torch.library.Library("testbed", "DEF")
    library.define("attention(Tensor x) -> Tensor")
    library.impl("attention", lambda x: x / 2, "CompositeExplicitAutograd")
    torch.library.register_fake("testbed::attention", torch.empty_like, lib=library)

    class Model(torch.nn.Module):
        def __init__(self, *, vllm_config: object, prefix: str = "", layers: list[torch.nn.Module]) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.ops.testbed.attention(layer(x)[0])
            return x

    def weights(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.randn(rank, WIDTH) / 8).half(), (torch.randn(WIDTH, rank) / 2).half()

    with set_current_vllm_config(config), torch.inference_mode(), tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.manual_seed(0)
        wrapper = resolve_obj_by_qualname(current_platform.get_punica_wrapper())(32, 4, "cpu", lora_config=lora)
        bases = [ReplicatedLinear(WIDTH, WIDTH, bias=False, params_dtype=torch.float16) for _ in range(2)]
        layers = []
        for base in bases:
            torch.nn.init.normal_(base.weight, std=0.1)
            base.quant_method.process_weights_after_loading(base)
            layers.append(from_layer(base, 2, lora, ["g"]))
            layers[-1].set_mapping(wrapper)
        model = support_torch_compile(dynamic_arg_dims={"x": 0})(Model)(vllm_config=config, layers=layers)
        slots: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        right = []
        for ids, ranks in BATCHES:
            for slot, rank in ranks.items():
                slots[slot] = [weights(rank) for _ in layers]
                for layer, (a, b) in zip(layers, slots[slot], strict=True):
                    layer.set_lora(slot, a, b)
            wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [7, 9], 3, 100)
            x = torch.randn(len(ids), WIDTH).half()
            with set_forward_context(None, config):
                y = model(x)
            want = x.float()
            for number, base in enumerate(bases):
                rows = want @ base.weight.float().T
                for row, lora_id in enumerate(ids):
                    if lora_id:
                        a, b = slots[(7, 9).index(lora_id)][number]
                        rows[row] += want[row] @ a.float().T @ b.float().T
                want = rows / 2
            right.append(bool((y.float() - want).abs().max() < 0.02 * want.abs().max()))
        return {
            "from_cache": bool(compilation_counter.num_aot_artifacts_loaded),
            "pieces": compilation_counter.num_piecewise_graphs_seen,
            "right": right,
        }


if __name__ == "__main__":
    main()
