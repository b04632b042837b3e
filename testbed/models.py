"""Build a tiny Llama and adapters for it with the real Transformers and PEFT, in seconds and without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT = "The quick brown fox jumps over"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog.",
    "SELECT name, price FROM orders WHERE price > 10 ORDER BY name;",
    "A request names an adapter; the server finds it, checks it, and answers with it.",
    "def shrink(x, a): return x @ a.T",
)


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter to build: its name (with `/` for subfolders), rank, and further `LoraConfig` arguments."""

    name: str
    rank: int
    targets: tuple[str, ...] = ATTENTION
    extra: Mapping[str, Any] = field(default_factory=dict)


DEMO_ADAPTERS = (
    AdapterSpec("sql", 8),
    AdapterSpec("chat", 16, ATTENTION + MLP),
    AdapterSpec("wide", 64, ATTENTION + MLP),
    AdapterSpec("stable", 16, ATTENTION, {"use_rslora": True}),
    AdapterSpec("team/poet", 8, ("q_proj", "v_proj", "up_proj", "down_proj")),
)


def build_base(
    directory: Path,
    *,
    hidden: int = 256,
    layers: int = 2,
    vocab: int = 512,
    intermediate: int | None = None,
    key_heads: int | None = None,
    seed: int = 0,
) -> Path:
    """Write a random float32 Llama (1.4 M parameters by default) with a byte-level tokenizer to `directory`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=key_heads or max(1, hidden // 128),
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
        # Wider than the usual 0.02, so that greedy answers vary instead of repeating one token.
        initializer_range=0.08,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(directory)
    write_tokenizer(directory, vocab)
    return directory


def write_tokenizer(directory: Path, vocab: int) -> None:
    """Write a byte-level tokenizer of at most `vocab` tokens to a model's directory."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=_byte_tokenizer(vocab),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(directory)


def _byte_tokenizer(vocab: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer


def build_adapter(base: Path, root: Path, spec: AdapterSpec, *, base_name: str | None = None, seed: int = 1) -> Path:
    """Write one adapter with non-zero random weights to `root/spec.name`, as PEFT itself saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed + sum(spec.name.encode()))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=2 * spec.rank,
        target_modules=list(spec.targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **dict(spec.extra),
    )
    peft_model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.06)
    directory = root / spec.name
    peft_model.save_pretrained(str(directory))
    edit_config(directory, base_model_name_or_path=base_name or str(base))
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of `adapter_config.json`; a value of `...` removes the key."""
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config, indent=2))
