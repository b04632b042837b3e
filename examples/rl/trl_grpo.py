"""TRL's GRPOTrainer, unmodified, with rollouts from `vllm serve`: trl_grpo.py BASE_MODEL NAME STEPS.

Each step pushes the policy's adapter over HTTP, and samples exactly this version. vLLM has no patch of TRL's, shares no
directory with the trainer, and serves other adapters meanwhile.

Run by hand: three steps of TRL 1.16.0 on the CPU, beside vLLM 0.32, on a server of this project's small random model,
in which rewards mean nothing; each step had a digest of its own. There `Dataset.from_dict` of datasets 5.2.0 could not
make its fingerprint (PicklingError), so the run gave it one. Not run: a GPU, a real model, several processes (process 0
is to push, and the others are to be told the digest). No test runs this file: TRL is no dependency of this project.
"""

import os
import sys
from typing import Any

import httpx
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from trl import GRPOConfig, GRPOTrainer

from lora_plugins.client import push

BASE, NAME, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
URL, KEY = os.environ.get("LORA_PLUGINS_URL", "http://localhost:8000"), os.environ.get("LORA_PLUGINS_ADMIN_KEY", "none")


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Push the policy, and complete each prompt once with exactly this version: TRL repeats a group's prompt itself."""
    model, args = trainer.accelerator.unwrap_model(trainer.model), trainer.args
    config = model.peft_config["default"].to_dict()
    digest = push(NAME, get_peft_model_state_dict(model), config, servers=[URL], key=KEY).digest
    body = {"model": f"{NAME}@{digest}", "prompt": prompts, "temperature": args.temperature, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    body["max_tokens"] = args.max_completion_length
    answer = httpx.post(f"{URL}/v1/completions", json=body, headers=headers, timeout=600).raise_for_status()
    assert answer.headers["x-lora-digest"] == digest, "sampled from another version"
    print(f"step {trainer.state.global_step}: {len(prompts)} rollouts of {NAME}@{digest[:12]}")
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    # On-policy by the digest: no importance sampling, so no log-probabilities of the sampler.
    return {
        "prompt_ids": [choice["prompt_token_ids"] for choice in choices],
        "completion_ids": [choice["token_ids"] for choice in choices],
        "logprobs": None,
    }


def reward(completions: list[str], **_: Any) -> list[float]:
    """Yours goes here."""
    return [float(completion.count("e")) for completion in completions]


arguments = GRPOConfig(
    "trl-grpo", max_steps=STEPS, per_device_train_batch_size=8, num_generations=4, max_completion_length=16,
    learning_rate=1e-3, save_strategy="no", report_to=[], use_cpu=os.environ.get("USE_CPU") == "1", bf16=False,
)  # fmt: skip
prompts = Dataset.from_dict({"prompt": ["The quick brown fox", "SELECT name FROM"] * STEPS})
GRPOTrainer(
    BASE, reward, arguments, prompts, peft_config=LoraConfig(r=8, target_modules="all-linear"), rollout_func=rollout
).train()
