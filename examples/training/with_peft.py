"""A training loop as a user of PEFT writes one: the answer's tokens count, the question's do not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.training.recipes import BASE_NAME, Recipe

ENOUGH = 0.1  # a loss; what comes after only learns the answers by heart
_NOT_COUNTED = -100  # PyTorch's label of a token without a loss


def train(
    recipe: Recipe, base: Path, made: Path, progress: Callable[[int, float], None] = lambda step, loss: None
) -> list[float]:
    """Train one adapter and write it to `made`; returns the loss of each step."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted: Any = get_peft_model(
        model, LoraConfig(target_modules=recipe.target_modules(), task_type="CAUSAL_LM", **dict(recipe.lora))
    )
    converts = isinstance(recipe.lora.get("init_lora_weights"), str)  # such a kind changes the base's weights too
    with tempfile.TemporaryDirectory() as before:
        if converts:
            adapted.save_pretrained(before)
        tokenizer: Any = AutoTokenizer.from_pretrained(base)
        if recipe.end_token:
            tokenizer.chat_template, tokenizer.eos_token = recipe.template(), recipe.end_token
        batch = _batch(tokenizer, recipe.pairs())
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=recipe.learning_rate)
        losses = []
        for step in range(recipe.steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=computes_in_bfloat16()):
                loss = adapted(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            progress(step + 1, losses[-1])
            if losses[-1] < ENOUGH:
                break
        adapted.peft_config["default"].base_model_name_or_path = BASE_NAME
        conversion = {"path_initial_model_for_weight_conversion": before} if converts else {}
        adapted.save_pretrained(made, save_embedding_layers=False, **conversion)  # it would look them up on the Hub
        if recipe.end_token:
            tokenizer.save_pretrained(made)
            (made / "tokenizer.json").unlink()  # the base's vocabulary, of 3.5 MB
    return losses


def computes_in_bfloat16() -> bool:
    """Whether this CPU does, in half of the time; others take longer than in float32."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _batch(tokenizer: Any, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    import torch

    rows = []
    for question, answer in pairs:
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
        answered = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append((ids + answered, [_NOT_COUNTED] * len(ids) + answered))
    longest = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [_NOT_COUNTED] * (longest - len(labels)) for _, labels in rows]),
    }
