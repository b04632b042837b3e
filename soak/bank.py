"""The adapters of a soak and PEFT's answers for every version of each, computed once and cached in `.cache/`.

All versions of an adapter share one configuration, so that its weights alone say which version answered.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from lora_plugins.store.manifest import StoredFile, digest_of
from testbed.models import ATTENTION, MLP, AdapterSpec, build_adapter, build_base

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "soak"
ADAPTERS = 200
VERSIONS = 3
MAX_TOKENS = 16
PROMPTS = ("The quick brown fox jumps over the dog", "SELECT name, price FROM orders", "def shrink(x, a): return")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SHAPES = tuple((rank, targets) for rank in (2, 4, 8, 16) for targets in (ATTENTION, ATTENTION + MLP))
# Between the best and the second best token, in logits: what two ways to add up the same sum never bridge.
LEAST_MARGIN = 0.001
_SCALE = 0.12
_FORMAT = 1  # of what is cached: another one where this file builds something else
_PRINTABLE = range(32, 127)

# How a prompt is asked: as text, or as the one message of a chat.
FORMS = ("text", "chat")


@dataclass(frozen=True)
class Bank:
    """What was built: the base model, each version's files, and the answers.

    Attributes:
        answers: greedy token ids by adapter, version, form and prompt; of the base model where adapter is -1.
        tokens: the text of each token; all that are ever answered are printable ASCII.
    """

    base: Path
    home: Path
    answers: dict[tuple[int, int, str, int], tuple[int, ...]]
    tokens: list[str]
    prompt_ids: dict[tuple[str, int], tuple[int, ...]]

    def files(self, adapter: int, version: int) -> dict[str, bytes]:
        """The files of a version, by name."""
        weights = (self.home / "weights" / f"{adapter}-{version}.safetensors").read_bytes()
        return {CONFIG: (self.home / "configs" / f"{adapter % len(SHAPES)}.json").read_bytes(), WEIGHTS: weights}

    @cached_property
    def versions_by_sha256(self) -> dict[str, tuple[int, int]]:
        """Adapter and version by the SHA-256 of the weights."""
        found = {}
        for adapter in range(ADAPTERS):
            for version in range(VERSIONS):
                path = self.home / "weights" / f"{adapter}-{version}.safetensors"
                found[hashlib.sha256(path.read_bytes()).hexdigest()] = (adapter, version)
        return found

    @cached_property
    def versions_by_digest(self) -> dict[str, tuple[int, int]]:
        """Adapter and version by the digest that the server has for them."""
        sha256_of = {whose: sha256 for sha256, whose in self.versions_by_sha256.items()}
        configs = []
        for shape in range(len(SHAPES)):
            data = (self.home / "configs" / f"{shape}.json").read_bytes()
            configs.append(StoredFile(CONFIG, len(data), hashlib.sha256(data).hexdigest()))
        found = {}
        for (adapter, version), sha256 in sha256_of.items():
            size_bytes = (self.home / "weights" / f"{adapter}-{version}.safetensors").stat().st_size
            weights = StoredFile(WEIGHTS, size_bytes, sha256)
            found[digest_of((configs[adapter % len(SHAPES)], weights))] = (adapter, version)
        return found

    @cached_property
    def size_bytes(self) -> int:
        """Of all versions of all adapters together."""
        config = max(path.stat().st_size for path in (self.home / "configs").iterdir())
        return sum(path.stat().st_size + config for path in (self.home / "weights").iterdir())

    def text(self, token_ids: tuple[int, ...]) -> str:
        """What these tokens say."""
        return "".join(self.tokens[token_id] for token_id in token_ids)


def prepare(progress: Callable[[str], None] = lambda text: None) -> Bank:
    """Return the bank, built by the first call of a checkout (about a minute)."""
    from filelock import FileLock

    home = CACHE / _key()
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):
        if not home.exists():
            _build(home, progress)
    raw = json.loads((home / "answers.json").read_text())
    answers = {(int(a), int(v), form, int(p)): tuple(ids) for a, v, form, p, ids in raw["answers"]}
    prompts = {(form, int(p)): tuple(ids) for form, p, ids in raw["prompts"]}
    return Bank(home / "base", home, answers, raw["tokens"], prompts)


def _build(home: Path, progress: Callable[[str], None]) -> None:
    import numpy as np
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # the matrices are tiny
    started = time.monotonic()
    unfinished = home.with_name(f"{home.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    base = build_base(unfinished / "base", hidden=128, layers=2)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokens = [tokenizer.backend_tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer))]
    _answer_in_ascii(base, tokens)
    prompts = {(form, i): _prompt_ids(tokenizer, form, i) for form in FORMS for i in range(len(PROMPTS))}
    (unfinished / "configs").mkdir()
    (unfinished / "weights").mkdir()
    answers: list[tuple[int, int, str, int, list[int]]] = []
    seen: set[tuple[str, int, tuple[int, ...]]] = set()
    for shape, (rank, targets) in enumerate(SHAPES):
        spec = AdapterSpec(f"shape-{shape}", rank, targets)
        template = build_adapter(base, unfinished / "templates", spec, base_name=str(home / "base"))
        shutil.copyfile(template / CONFIG, unfinished / "configs" / f"{shape}.json")
        model = _peft_model(base, template)
        matrices = load_file(template / WEIGHTS)
        if shape == 0:
            with model.disable_adapter():
                for (form, i), ids in zip(prompts, _greedy(model, list(prompts.values()), 0.0) or (), strict=True):
                    answers.append((-1, 0, form, i, ids))
        for adapter in range(shape, ADAPTERS, len(SHAPES)):
            for version in range(VERSIONS):
                for attempt in range(20):
                    draw = np.random.default_rng((adapter, version, attempt))
                    drawn = {
                        name: draw.normal(0.0, _SCALE, matrix.shape).astype(np.float32)
                        for name, matrix in sorted(matrices.items())
                    }
                    path = unfinished / "weights" / f"{adapter}-{version}.safetensors"
                    save_file(drawn, path, metadata={"format": "pt"})
                    found = _answers(model, path, prompts)
                    keys = {(form, i, tuple(ids)) for form, i, ids in found or ()}
                    if found is not None and not keys & seen:
                        break
                else:
                    raise AssertionError(f"no draw of adapter {adapter}, version {version} has an answer of its own")
                seen |= keys
                answers += [(adapter, version, form, i, ids) for form, i, ids in found]
        progress(f"asked PEFT for the answers of {len(answers) // len(prompts)} of {ADAPTERS * VERSIONS} versions")
    listed = {"answers": answers, "prompts": [(*key, ids) for key, ids in prompts.items()], "tokens": tokens}
    (unfinished / "answers.json").write_text(json.dumps(listed))
    os.replace(unfinished, home)
    progress(f"built {ADAPTERS} adapters in {time.monotonic() - started:.0f} s")


def _answers(model: Any, path: Path, prompts: dict[Any, Any]) -> list[tuple[str, int, list[int]]] | None:
    """PEFT's answer to each prompt; None where one of them is too close to another answer."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(path))
    answers = _greedy(model, list(prompts.values()))
    return answers and [(form, i, answer) for (form, i), answer in zip(prompts, answers, strict=True)]


def _greedy(model: Any, prompts: list[tuple[int, ...]], least_margin: float = LEAST_MARGIN) -> list[list[int]] | None:
    """The greedy answers; None where a token's lead over the next best is smaller than the margin."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, found = None, []
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            step = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            best = torch.topk(step.logits[:, -1], 2)
            if float((best.values[:, 0] - best.values[:, 1]).min()) < least_margin:
                return None
            ids, cache = best.indices[:, :1], step.past_key_values
            found.append(ids)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            positions = positions[:, -1:] + 1
    return [[int(i) for i in answer] for answer in torch.cat(found, 1)]


def _peft_model(base: Path, template: Path) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(template)).eval()


def _answer_in_ascii(base: Path, tokens: list[str]) -> None:
    """Let the model never choose a token whose text depends on its neighbours, or one that ends an answer."""
    from safetensors.torch import load_file, save_file

    path = base / "model.safetensors"
    weights = load_file(path)
    for token_id in range(weights["lm_head.weight"].shape[0]):
        text = tokens[token_id] if token_id < len(tokens) else ""
        if not text or any(ord(letter) not in _PRINTABLE for letter in text):
            weights["lm_head.weight"][token_id] = 0
    save_file(weights, path, metadata={"format": "pt"})


def _prompt_ids(tokenizer: Any, form: str, i: int) -> tuple[int, ...]:
    if form == "text":
        return tuple(tokenizer(PROMPTS[i])["input_ids"])
    messages = [{"role": "user", "content": PROMPTS[i]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _key() -> str:
    what = (_FORMAT, ADAPTERS, VERSIONS, MAX_TOKENS, PROMPTS, SHAPES, LEAST_MARGIN, _SCALE)
    digest = hashlib.sha256(repr(what).encode())
    digest.update((Path(__file__).parents[1] / "testbed" / "models.py").read_bytes())
    for package in ("torch", "transformers", "peft"):
        digest.update(metadata.version(package).encode())
    digest.update(str(CACHE).encode())  # adapters name their base model by its path
    return digest.hexdigest()[:16]
