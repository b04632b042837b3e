"""A trainer whose policy is served while it learns: rl_loop.py BASE_MODEL ADAPTER_ROOT NAME STEPS."""

import os
import sys
from pathlib import Path

import httpx
import torch
from openai import OpenAI
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

BASE, ROOT, NAME, STEPS = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
URL, KEY = os.environ.get("LORA_PLUGINS_URL", "http://localhost:8000"), os.environ.get("LORA_PLUGINS_ADMIN_KEY", "none")
PROMPTS = ["The quick brown fox", "SELECT name FROM"]
admin = httpx.Client(base_url=f"{URL}/v1", headers={"Authorization": f"Bearer {KEY}"}, timeout=300)
rollouts = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), LoraConfig(r=8, target_modules="all-linear"))
optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=1e-3)
SAMPLING = {"n": 4, "max_tokens": 16, "temperature": 1.0, "extra_body": {"return_token_ids": True}}
digest = "*"  # the version that must be served for the next one to take its place; at first any
for step in range(STEPS):
    folder = ROOT / ".versions" / f"{NAME}-{step}"  # led by a dot: no adapter's name, so nobody can ask for it
    model.save_pretrained(folder)
    (link := ROOT / f".{NAME}-new").symlink_to(folder.relative_to(ROOT))
    os.replace(link, ROOT / NAME)  # published: whoever reads the name meanwhile reads one version, whole
    admin.post("/loras", json={"lora_name": NAME}).raise_for_status()  # loads it in the first step, does nothing later
    status = admin.post(f"/loras/{NAME}/refresh", headers={"If-Match": digest}).raise_for_status().json()
    assert step == 0 or (status["swapped"] and status["previous_digest"] == digest), status
    digest = status["digest"]  # of what the rollouts below are made with
    loss = torch.zeros(())
    for prompt in PROMPTS:
        choices = rollouts.completions.create(model=NAME, prompt=prompt, **SAMPLING).choices
        rewards = torch.tensor([float(choice.text.count("e")) for choice in choices])  # yours goes here
        for choice, advantage in zip(choices, rewards - rewards.mean(), strict=True):
            tokens = torch.tensor([choice.prompt_token_ids + choice.token_ids])
            scores = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
            loss = loss - advantage * scores[-len(choice.token_ids) :].mean() / len(choices)
    (optimizer.zero_grad(), loss.backward(), optimizer.step())
    print(f"step {step}: digest {digest[:12]}, swapped {status['swapped']}, mean reward {rewards.mean():.2f}")
