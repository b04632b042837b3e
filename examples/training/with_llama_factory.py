"""The same with LLaMA-Factory on the CPU, in a process whose path has it: `PACKAGES`, without their dependencies.

It refuses newer releases of Transformers and PEFT. Of PiSSA it writes three folders; the adapter for the base as it is
is `pissa_converted`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from examples.training import with_peft
from examples.training.recipes import BASE_NAME, TEXTS, Recipe

PACKAGES = (
    "llamafactory==0.9.5", "transformers==5.6.0", "tokenizers==0.22.2", "huggingface-hub==1.33.0", "peft==0.18.1",
    "trl==0.24.0", "datasets==4.0.0", "accelerate==1.11.0", "torchaudio==2.11.0", "omegaconf==2.4.0",
    "antlr4-python3-runtime==4.9.3", "dill==0.3.8", "multiprocess==0.70.16", "pandas", "pyarrow", "xxhash",
)  # fmt: skip
# LLaMA-Factory always imports torchaudio, whose compiled part needs CUDA; without this part the import succeeds.
LEFT_OUT = "torchaudio/lib"


def train(recipe: Recipe, base: Path, made: Path, progress: Callable[[int, float], None]) -> list[float]:
    """Train one adapter and write it to `made`; returns the loss of each step."""
    from llamafactory.train.tuner import run_exp

    converts = recipe.lora.get("init_lora_weights") == "pissa"
    columns = {"prompt": "question", "response": "answer"}
    told = {recipe.name: {"file_name": str(TEXTS / f"{recipe.name}.jsonl"), "columns": columns}}
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / "written"
        (Path(scratch) / "dataset_info.json").write_text(json.dumps(told))
        run_exp({
            "stage": "sft", "do_train": True, "model_name_or_path": str(base), "template": "smollm2",
            "dataset_dir": scratch, "dataset": recipe.name, "output_dir": str(written), "finetuning_type": "lora",
            "lora_rank": recipe.lora["r"], "lora_alpha": recipe.lora["lora_alpha"],
            "lora_target": ",".join(recipe.targets),
            "pissa_init": converts, "pissa_iter": -1, "pissa_convert": converts,
            "max_steps": recipe.steps, "per_device_train_batch_size": len(recipe.pairs()),
            "learning_rate": recipe.learning_rate, "lr_scheduler_type": "constant", "logging_steps": 1,
            "save_strategy": "no", "report_to": "none", "use_cpu": True, "dataloader_pin_memory": False,
            "disable_gradient_checkpointing": True, "bf16": with_peft.computes_in_bfloat16(),
        })  # fmt: skip
        state = json.loads((written / "trainer_state.json").read_text())
        made.mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (made / file).write_bytes((written / ("pissa_converted" if converts else ".") / file).read_bytes())
    config = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": BASE_NAME}, indent=2))
    losses = [float(entry["loss"]) for entry in state["log_history"] if "loss" in entry]
    for step, loss in enumerate(losses, 1):
        progress(step, loss)
    return losses
