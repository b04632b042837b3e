"""TRL's AsyncGRPOTrainer with nothing of it changed but its GPU kernel: URL BASE_MODEL FOLDER STEPS STALENESS TOKENS.

What is not TRL's: attention over packed sequences, for which TRL has a CUDA kernel only (FlashAttention), in torch; the
peak FLOPS of a device, which CPUs lack; and a fingerprint of the data set, as datasets 5.2.0 cannot pickle it here. The
tokenizer has a response template, which TRL asks its users for where it does not know a chat template.
"""

from __future__ import annotations

import sys
import uuid
from types import SimpleNamespace
from typing import Any

PROMPTS = (
    "Tell a long story of a ship and its crew.", "Write down all that you know of trees.", "What is the sea?",
    "Describe a town in winter, house by house.", "Name ten birds, and say where each lives.", "Explain bread.",
    "Tell me about the moon, and about every planet.", "Write a long letter to a friend.",
)  # fmt: skip

ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [sum(letter == "e" for letter in one[0]["content"]) / (1 + len(one[0]["content"])) for one in completions]


def attention(
    queries: Any, keys: Any, values: Any, starts: Any, key_starts: Any, longest: int, longest_keys: int,
    softmax_scale: float | None = None, **_: Any,
) -> Any:  # fmt: skip
    """FlashAttention's `flash_attn_varlen_func` for causal attention."""
    import torch

    answers, repeats = [], queries.shape[1] // keys.shape[1]
    for begin, end, key_begin, key_end in zip(starts[:-1], starts[1:], key_starts[:-1], key_starts[1:], strict=True):
        query = queries[begin:end].transpose(0, 1)
        key, value = (it[key_begin:key_end].transpose(0, 1).repeat_interleave(repeats, 0) for it in (keys, values))
        rows, columns = query.shape[1], key.shape[1]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        of_one = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=softmax_scale)
        answers.append(of_one.transpose(0, 1))
    return torch.cat(answers)


def main(url: str, base: str, folder: str, steps: int, staleness: int, tokens: int) -> None:
    import datasets.arrow_dataset
    import torch
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    torch.set_num_threads(1)
    datasets.arrow_dataset.generate_fingerprint = lambda *_, **__: uuid.uuid4().hex
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.response_template = ANSWER
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    arguments = AsyncGRPOConfig(
        folder, vllm_server_base_url=url, max_steps=steps, max_staleness=staleness, max_completion_length=tokens,
        per_device_train_batch_size=4, num_generations=4, max_inflight_tasks=8, token_budget=600, learning_rate=3e-3,
        gradient_accumulation_steps=1, gradient_checkpointing=False, use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", logging_steps=1, seed=steps,
    )  # fmt: skip
    AsyncGRPOTrainer(
        base, reward, arguments, datasets.Dataset.from_list(rows), processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    ).train()  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
