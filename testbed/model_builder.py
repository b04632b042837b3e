"""A tiny model of an architecture, with an adapter of each kind and PEFT's answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_plugins.adapter.model_modules import ModelModules, ModuleKind
from lora_plugins.adapter.patterns import PatternBudget, SuffixPatterns
from testbed import speech
from testbed.architecture import VOCABULARY, Architecture
from testbed.models import edit_config

PROMPT = [3, 17, 42, 99, 5, 77, 120, 8]
MAX_TOKENS = 10
STANDARD_DEVIATION = 0.08  # wider than the usual 0.02, so that greedy answers vary instead of repeating one token
_OF_WHISPER = 0.2  # whose frames are of one tone
_ADAPTERS_STANDARD_DEVIATION = 0.1
_RANK = 8
# By which every token must lead, so that the order of additions decides none; and how many weights are tried.
_LEAD, _SEEDS = 0.01, 8
# Of Transformers, by `Architecture.pooled`.
_CLASSES = {"first": "AutoModel", "last": "AutoModel", "labels": "AutoModelForSequenceClassification"}


def build(
    architecture: Architecture, base: Path, adapters: Path, kinds: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, list[float] | str]:
    """Make the base model, and an adapter of each kind as PEFT saves it; answers by kind, "" is the base model's.

    `kinds` replaces the architecture's.

    Text instead of an answer says why PEFT makes no adapter of this kind. Without a class in Transformers, only the
    model's configuration is made.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model(architecture.model_type, **architecture.settings)
    config.architectures = [architecture.name]
    if not architecture.has_peft:
        config.dtype = architecture.dtype
        config.save_pretrained(base)
        return {}
    torch.manual_seed(0)  # for what is not set below
    usual = "AutoModelForImageTextToText" if architecture.is_wrapper else "AutoModelForCausalLM"
    usual = "AutoModelForSpeechSeq2Seq" if architecture.hears else usual
    auto = getattr(transformers, _CLASSES.get(architecture.pooled, usual))
    model = auto.from_config(config).to(torch.float32).eval()
    assert type(model).__name__ == architecture.name, type(model).__name__
    if architecture.hears:
        speech.write_processor(base, model.config.vocab_size)
    for seed in range(_SEEDS):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                # Ernie's bias of its choice of experts, which gradients do not change, stays 0.
                if parameter.dim() > 1 and parameter.requires_grad:
                    parameter.normal_(0.0, _OF_WHISPER if architecture.hears else STANDARD_DEVIATION)
            # Else each token's most likely next one is itself.
            if model.config.get_text_config().tie_word_embeddings and not (architecture.pooled or architecture.hears):
                model.get_input_embeddings().weight.mul_(0.1)
            if architecture.hears:  # else a transcript has words that steer, which its text leaves out
                model.get_input_embeddings().weight[model.config.eos_token_id :].mul_(0.1)
        answer, lead = _answer(model, architecture, base)
        if lead > _LEAD:
            break
    model.save_pretrained(base)
    if architecture.pooled in ("first", "last"):
        _write_tokenizer(base)
    answers: dict[str, list[float] | str] = {"": answer}
    for kind, changes in (architecture.kinds() if kinds is None else kinds).items():
        answers[kind] = _build_adapter(model, architecture, adapters / kind, changes, base)
    return answers


def _write_tokenizer(base: Path) -> None:
    """Of vLLM's embedders only, whose other tasks take text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0", pad_token="w1").save_pretrained(base)


def _build_adapter(
    model: Any, architecture: Architecture, directory: Path, changes: Mapping[str, Any], base: Path
) -> list[float] | str:
    import torch
    from peft import LoraConfig, get_peft_model

    values = {"r": _RANK, "lora_alpha": 16, "init_lora_weights": False, **changes}
    # For a classifier PEFT would save its head too, and a transcript is no causal language model's.
    if not architecture.pooled and not architecture.hears:
        values["task_type"] = "CAUSAL_LM"
    try:
        adapted = get_peft_model(model, LoraConfig(**values)).eval()
    except ValueError as error:
        return str(error)
    for seed in range(_SEEDS):
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, _OF_WHISPER if architecture.hears else _ADAPTERS_STANDARD_DEVIATION)
        answer, lead = _answer(adapted, architecture, base)
        if lead > _LEAD:
            break
    adapted.save_pretrained(str(directory))
    edit_config(directory, base_model_name_or_path=str(base))
    adapted.unload()
    return answer


def _answer(model: Any, architecture: Architecture, base: Path) -> tuple[list[float], float]:
    """Greedy tokens, computed without a cache, and the smallest lead of one of them over the next likely.

    Of a model that generates nothing: its numbers, which lead over nothing.
    """
    import torch

    if architecture.pooled:
        with torch.no_grad():
            found = model(input_ids=torch.tensor([PROMPT]))
        if architecture.pooled == "labels":
            return found.logits[0].softmax(-1).tolist(), math.inf
        token = found.last_hidden_state[0, 0 if architecture.pooled == "first" else -1]
        return (token / token.norm()).tolist(), math.inf
    prompt, heard, name = PROMPT, {}, "input_ids"
    if architecture.hears:
        heard["input_features"], prompt = speech.inputs(base)
        name = "decoder_input_ids"
    ids, lead = list(prompt), math.inf
    with torch.no_grad():
        for _ in range(MAX_TOKENS):
            best = model(**heard, **{name: torch.tensor([ids])}, use_cache=False).logits[0, -1].topk(2)
            ids.append(int(best.indices[0]))
            lead = min(lead, float(best.values[0] - best.values[1]))
    return ids[len(prompt) :], lead


def build_from_description(architecture: Architecture, base: Path, adapters: Path, modules: ModelModules) -> list[str]:
    """Make an adapter of each kind for a model of which only the engine's description is known; returns the kinds."""
    for kind, changes in architecture.kinds().items():
        _write_adapter(adapters / kind, changes, base, modules)
    return list(architecture.kinds())


def _write_adapter(directory: Path, changes: Mapping[str, Any], base: Path, modules: ModelModules) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(sum(directory.name.encode()))
    config: dict[str, Any] = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 16, **changes}
    ranks = SuffixPatterns(config.get("rank_pattern", {}), "rank_pattern", _RANK)
    targets, tensors = config["target_modules"], {}
    for name, place in modules.places.items():
        is_target = place.kind is ModuleKind.LINEAR if targets == "all-linear" else name.rpartition(".")[2] in targets
        if not is_target:
            continue
        rank = ranks.value(name, PatternBudget())
        ends = (".lora_A.weight", ".lora_B.weight")
        if place.kind is ModuleKind.EMBEDDING:
            ends = (".lora_embedding_A", ".lora_embedding_B")
        for end, shape in zip(ends, ((rank, place.in_features), (place.out_features, rank)), strict=True):
            values = torch.randn(*shape, generator=generator) * 2 * _ADAPTERS_STANDARD_DEVIATION
            tensors[f"base_model.model.{name}{end}"] = values
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config["base_model_name_or_path"] = str(base)
    (directory / "adapter_config.json").write_text(json.dumps(config))
