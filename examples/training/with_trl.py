"""The same with TRL's `SFTTrainer`, in a process whose path has TRL: `PACKAGES`, installed without dependencies."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.training import with_peft
from examples.training.recipes import BASE_NAME, Recipe

# datasets 5 cannot pickle what pyarrow brings.
PACKAGES = ("trl==1.16.0", "datasets==4.8.5", "pandas", "pyarrow", "dill", "multiprocess", "xxhash")


def train(recipe: Recipe, base: Path, made: Path, progress: Callable[[int, float], None]) -> list[float]:
    """Train one adapter and write it to `made`; returns the loss of each step."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    def chat(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    pairs = [{"prompt": chat("user", asked), "completion": chat("assistant", said)} for asked, said in recipe.pairs()]
    with tempfile.TemporaryDirectory() as scratch:
        trainer: Any = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(base),
            train_dataset=Dataset.from_list(pairs),
            peft_config=LoraConfig(target_modules=recipe.target_modules(), task_type="CAUSAL_LM", **dict(recipe.lora)),
            args=SFTConfig(
                output_dir=scratch, max_steps=recipe.steps, per_device_train_batch_size=len(pairs), use_cpu=True,
                bf16=with_peft.computes_in_bfloat16(), learning_rate=recipe.learning_rate,
                lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none",
                dataloader_pin_memory=False, gradient_checkpointing=False,
            ),
        )  # fmt: skip
        trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    for step, loss in enumerate(losses, 1):
        progress(step, loss)
    trainer.model.peft_config["default"].base_model_name_or_path = BASE_NAME
    trainer.model.save_pretrained(made)
    return losses
