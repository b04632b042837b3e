"""Figure of docs/operate/capacity.md, for R17 and R24.

What slots take of device memory, and adapters of host memory, for a model of a given shape; needs no weights.

    python -m benchmarks.capacity                 # an 8B Llama: the table of docs/operate/capacity.md
    python -m benchmarks.capacity config.json     # your model's, printed only

vLLM's own layers are made on torch's `meta` device, where they take no memory, and the bytes of their slots are added
up by the function that `get_lora_metrics` uses. One worker, bfloat16, without `--fully-sharded-loras`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, keep
from lora_plugins.cli.output import size

KEPT = RESULTS / "capacity.json"
LLAMA_8B = {  # the shape of Llama 3.1 8B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
RANKS = (8, 16, 32, 64, 128)
MAX_LORAS, IN_HOST_MEMORY = 16, 60
OF_THE_VOCABULARY = ("embed_tokens", "lm_head")


def main(arguments: list[str]) -> int:
    config = json.loads(Path(arguments[0]).read_text()) if arguments else LLAMA_8B
    with one_process():
        rows = [row(config, rank) for rank in RANKS]
    print(table(rows))
    if not arguments:
        keep(KEPT.stem, rows)
    return 0


def row(config: dict[str, Any], rank: int) -> dict[str, int]:
    """Bytes with `--max-lora-rank` of `rank`, and with adapters of that rank on every linear layer."""
    slot_bytes, linear_bytes = one_slot(config, rank)
    return {
        "rank": rank,
        "slot_bytes": slot_bytes,
        "slots_bytes": MAX_LORAS * slot_bytes,
        "adapter_bytes": linear_bytes,
    }


def table(rows: list[dict[str, int]]) -> str:
    """As it stands in the page."""
    head = (
        f"| rank | one slot | `--max-loras {MAX_LORAS}`: all slots | an adapter in host memory "
        f"| {IN_HOST_MEMORY} of them |\n|---|---|---|---|---|"
    )
    lines = [
        f"| {one['rank']} | {size(one['slot_bytes'])} | {size(one['slots_bytes'])} | {size(one['adapter_bytes'])} "
        f"| {size(IN_HOST_MEMORY * one['adapter_bytes'])} |"
        for one in rows
    ]
    return "\n".join([head, *lines])


def one_slot(config: dict[str, Any], rank: int) -> tuple[int, int]:
    """Bytes of one slot of all modules, and of those that are not the vocabulary's; inside `one_process`."""
    import torch
    from vllm.config import LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from lora_plugins.scheduler.messages import Slots
    from lora_plugins.worker.lora_metrics import slot_bytes

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        whole = VllmConfig(
            model_config=ModelConfig(directory, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64),
            lora_config=LoRAConfig(max_lora_rank=rank, max_loras=1, max_cpu_loras=1, lora_dtype=torch.bfloat16),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, is_encoder_decoder=False
            ),
        )
        nowhere = torch.device("meta")
        with set_current_vllm_config(whole), set_default_torch_dtype(torch.bfloat16), nowhere:
            model = initialize_model(whole)
            manager = LoRAModelManager(model, 8, 64, config["vocab_size"], whole.lora_config, nowhere, whole)
    linear = {name: module for name, module in manager.modules.items() if not name.endswith(OF_THE_VOCABULARY)}
    return slot_bytes(manager.modules, Slots(1)), slot_bytes(linear, Slots(1))


@contextmanager
def one_process() -> Iterator[None]:
    """What vLLM's layers ask of torch.distributed: a world of this process alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
