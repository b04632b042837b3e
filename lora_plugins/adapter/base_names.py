"""Compares the names of two base models: whether family, size or variant differ.

The rules are the tables below, made from names of Hub repositories. A name that no rule knows differs from no name.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_LONGEST = 200  # a longer name is not read
# The Hub's cache: models--<org>--<name>/snapshots/<commit>
HUB_CACHE = re.compile(r"(?:^|/)models--(?P<repo>[^/]+)/snapshots/[0-9a-f]{7,64}/?$")

# More specific families come first. A space stands for nothing or `-`, a point for nothing, `.` or `-`.
_FAMILIES = (
    *("deepseek r1 0528 qwen 3", "deepseek r1 distill qwen", "deepseek r1 distill llama", "deepseek r1"),
    *("deepseek coder v2", "deepseek coder", "deepseek math", "deepseek llm", "deepseek vl2", "deepseek vl"),
    *("deepseek v3.2", "deepseek v3.1", "deepseek v3", "deepseek v2.5", "deepseek v2"),
    *("code llama", "tiny llama", "llama 4", "llama 3.3", "llama 3.2", "llama 3.1", "llama 3", "llama 2", "llama"),
    *("qwen 3.6", "qwen 3.5", "qwen 3 next", "qwen 3", "qwen 2.5", "qwen 2", "qwen 1.5", "qwen", "qwq", "qvq"),
    *("mistral nemo", "mistral small 4", "mistral small 3.2", "mistral small 3.1", "mistral small"),
    *("mistral medium", "mistral large 3", "mistral large", "mistral", "mixtral", "ministral 3", "ministral"),
    *("codestral", "devstral", "magistral", "mathstral", "pixtral", "voxtral"),
    *("gemma 4", "gemma 3n", "gemma 3", "gemma 2", "gemma", "code gemma", "pali gemma 2", "pali gemma", "med gemma"),
    *("embedding gemma", "function gemma", "recurrent gemma", "t5 gemma"),
    *("phi 4", "phi 3.5", "phi 3", "phi 2", "phi 1.5", "phi 1", "phi"),
    *("gpt oss", "gpt neox", "gpt neo", "gpt j", "gpt 2", "pythia", "opt", "bloomz", "bloom", "mpt", "dbrx"),
    *("falcon h1", "falcon 3", "falcon", "stablelm 2", "stablelm", "starcoder 2", "starcoder", "solar"),
    *("olmoe", "olmo 3.1", "olmo 3", "olmo 2", "olmo", "smollm 3", "smollm 2", "smollm", "smolvlm 2", "smolvlm"),
    *("granite 4.0", "granite 3.3", "granite 3.2", "granite 3.1", "granite 3.0", "granite 4", "granite"),
    *("glm 5", "glm 4.7", "glm 4.6", "glm 4.5", "glm 4.1v", "glm 4v", "glm 4", "chatglm 3", "chatglm 2", "chatglm"),
    *("internlm 3", "internlm 2.5", "internlm 2", "internlm", "internvl 3.5", "internvl 3", "internvl 2.5"),
    *("baichuan 2", "baichuan", "yi 1.5", "yi", "exaone 4.0", "exaone 3.5", "exaone", "minicpm v", "minicpm 4"),
    *("minicpm 3", "minicpm", "kimi k2.5", "kimi k2", "kimi linear", "kimi vl", "moonlight", "minimax m2", "minimax"),
    *("command r7b", "command r", "command a", "aya expanse", "aya", "idefics 3", "idefics 2", "lfm 2.5", "lfm 2"),
    *("modernbert", "xlm roberta", "roberta", "bert", "jamba 1.5", "jamba", "mamba 2", "mamba", "ernie 4.5"),
    *("hunyuan", "seed oss", "nemotron h", "nemotron 3", "nemotron 4", "zephyr", "vicuna", "openchat"),
)
# Without a number, these names stand for any version.
_OF_ANY_VERSION = {"llama": "llama-", "qwen": "qwen-", "phi": "phi-", "granite": "granite-", "olmo": "olmo-"}
# Families whose plain name is the trained chat model, beside a model that is called `base`.
_CHAT_BY_NAME = {
    *("qwen-3", "qwen-3.5", "qwen-3.6", "smollm-3", "glm-4.5", "glm-4.6", "glm-4.7", "glm-5"),
    *("deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "granite-4.0", "lfm-2", "lfm-2.5", "ernie-4.5"),
}
# Part of a name → the variant, whose weights differ from the weights of a name without the part.
_VARIANTS = {
    **dict.fromkeys(("instruct", "it", "chat", "inst"), "instruct"),
    **dict.fromkeys(("base", "pt", "pretrained", "pretrain"), "base"),
    **dict.fromkeys(("coder", "code", "python"), "coder"),
    **dict.fromkeys(("vl", "vision", "v"), "vision"),
    **dict.fromkeys(("thinking", "think", "reasoning", "reasoner"), "thinking"),
    **dict.fromkeys(("embedding", "embed"), "embedding"),
    **dict.fromkeys(("reranker", "rerank"), "reranker"),
    **dict.fromkeys(("reward", "rm", "prm"), "reward"),
    **{name: name for name in ("math", "audio", "omni", "guard", "distill", "sft", "dpo", "next", "tts", "asr")},
    **{name: name for name in ("nemotron", "hermes", "dolphin", "tulu", "openhermes", "abliterated", "uncensored")},
}
# Sizes without a number.
_SIZE_WORDS = {"nano", "micro", "tiny", "mini", "small", "medium", "large", "xl", "xxl", "air", "lite", "flash"} | {
    *("scout", "maverick"),
}
# Parts that name the storage of weights, or the publisher: the model is the same.
_STORED = {
    *("unsloth", "bnb", "4bit", "8bit", "2bit", "3bit", "6bit", "nf4", "int4", "int8", "awq", "autoawq", "gptq"),
    *("gptqmodel", "autoround", "hqq", "aqlm", "eetq", "exl2", "exl3", "marlin", "quark", "torchao", "bitsandbytes"),
    *("fp8", "fp4", "nvfp4", "mxfp4", "mxfp8", "e4m3", "e5m2", "dynamic", "kv", "block", "quantized", "quant", "qat"),
    *("gguf", "ggml", "mlx", "onnx", "safetensors", "hf", "bf16", "fp16", "fp32", "f16", "f32", "float16", "bfloat16"),
    *("float32", "float8", "half", "sharded", "meta", "original", "transformers", "local", "copy", "sym", "asym"),
}
_STORED_NUMBERS = re.compile(r"w\d+a\d+|g\d+|gs\d+|\d+g|q\d|int\d|\d+bits?")  # W8A8, g128, 128g
_GGUF = re.compile(r"(?<![a-z0-9])i?q\d(?:-[k01])?(?:-(?:xl|l|m|s|xs|xxs|nl))?(?![a-z0-9])")  # Q4_K_M
# Numbers that are compared where both names have the number.
_NUMBERS = {
    "size": re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bm]|e\d+b"),
    "active size": re.compile(r"a\d+(?:\.\d+)?[bm]"),
    "experts": re.compile(r"\d+e"),
    "context": re.compile(r"\d+k"),
    "version": re.compile(r"v\d+(?:\.\d+)*"),
    "date": re.compile(r"\d{4}|\d{6}|\d{8}"),
}
_OF_SIZE = ("size", "active size", "experts")
_PARTS = re.compile(r"-|(?<!\d)\.|\.(?!\d)")


def _pattern(family: str) -> str:
    text = re.sub(r"(?<=[a-z]) (?=\d)| ", "-?", re.escape(family).replace(r"\ ", " "))
    return text.replace(r"\.", "[.-]?")


_FAMILY = re.compile(
    r"(?<![a-z0-9])(?:" + "|".join(f"({_pattern(family)})" for family in _FAMILIES) + r")(?![a-z0-9])(?!\.\d)"
)


@dataclass(frozen=True, slots=True)
class ModelName:
    """The facts in a base model's name.

    Attributes:
        family: `llama-3.1`.
        numbers: by kind (`size`: `8b`, `version`: `v0.3` …), as far as the name has numbers.
        size_words: sizes without a number (`mini`). variants: `instruct`, `coder` …
        has_more: whether the name has a part that no rule knows.
    """

    family: str
    numbers: Mapping[str, str]
    size_words: frozenset[str]
    variants: frozenset[str]
    has_more: bool


def last_part(name: str) -> str:
    """Return the name without organisation, directory (also of Windows) or the Hub's cache."""
    name = name.replace("\\", "/")
    cached = HUB_CACHE.search(name)
    repo = cached["repo"].replace("--", "/") if cached else name
    return as_the_hub(repo.rstrip("/").rpartition("/")[2])


def as_the_hub(name: str) -> str:
    """Return a name with its points, for which ModelScope's client writes three underscores in names of folders."""
    return name.replace("___", ".")


def shown(name: str) -> str:
    """Return a name for clients: a Hub id unchanged, and the last part of a path on any machine."""
    return last_part(name) if os.path.isabs(name) or "\\" in name or name.count("/") != 1 else name


@functools.lru_cache(maxsize=4096)
def read_name(name: str) -> ModelName | None:
    """Return the facts in a name; None without a family, or for a bare family that is also a common word."""
    text = last_part(name).lower().replace("_", "-").replace(" ", "-")
    if len(text) > _LONGEST:
        return None
    text = _GGUF.sub("-", text)
    found = {_FAMILIES[match.lastindex - 1].replace(" ", "-") for match in _FAMILY.finditer(text) if match.lastindex}
    # A bare family (`llama`) beside another family, such as a versioned one, says nothing more.
    of_any_version = found & _OF_ANY_VERSION.keys()
    families = found - of_any_version or of_any_version
    if len(families) != 1:
        return None
    family = families.pop()
    numbers: dict[str, str] = {}
    variants, size_words, has_more = set(), set(), False
    for part in _PARTS.split(_FAMILY.sub("-", text)):
        kind = next((kind for kind, pattern in _NUMBERS.items() if pattern.fullmatch(part)), None)
        if kind is not None and kind not in numbers:
            numbers[kind] = part
        elif part in _VARIANTS:
            variants.add(_VARIANTS[part])
        elif part in _SIZE_WORDS:
            size_words.add(part)
        elif part and part not in _STORED and not _STORED_NUMBERS.fullmatch(part):
            has_more = True
    # A family alone, without a number or a size, may be a word of another name.
    if not (numbers or size_words or any(map(str.isdigit, family))):
        return None
    if family not in _CHAT_BY_NAME:
        variants.discard("base")
    return ModelName(family, numbers, frozenset(size_words), frozenset(variants), has_more)


def differences(one: str, other: str) -> tuple[str, ...]:
    """Return in words how two named models differ; empty for equal models, or where a name has too few facts."""
    first, second = read_name(one), read_name(other)
    if first is None or second is None:
        return ()
    found = []
    if not _same_family(first.family, second.family):
        found.append(f"another family ({first.family}, not {second.family})")
    both = [kind for kind in _NUMBERS if kind in first.numbers and kind in second.numbers]
    numbers = [kind for kind in both if first.numbers[kind] != second.numbers[kind]]
    found += [f"another {kind} ({first.numbers[kind]}, not {second.numbers[kind]})" for kind in numbers]
    if found and not set(numbers).isdisjoint(_OF_SIZE) and first.family != second.family:
        return tuple(found)  # a difference in size implies all further differences
    for what, ours, theirs in (
        ("size", first.size_words, second.size_words),
        ("variant", first.variants, second.variants),
    ):
        # A part that no rule knows may stand for a missing word.
        differs = (ours - theirs and not second.has_more) or (theirs - ours and not first.has_more)
        if differs or (what == "variant" and ours and theirs and ours.isdisjoint(theirs) and not found):
            found.append(f"another {what} ({_words(ours)}, not {_words(theirs)})")
    return tuple(found)


def known(name: str) -> int:
    """Return how many facts a name has, to choose among several names of a model; 0 for none."""
    read = read_name(name)
    return 0 if read is None else 1 + sum(map(bool, (read.numbers.get("size"), read.size_words, read.variants)))


def _same_family(one: str, other: str) -> bool:
    return (
        one == other
        or other.startswith(_OF_ANY_VERSION.get(one, "\0"))
        or one.startswith(_OF_ANY_VERSION.get(other, "\0"))
    )


def _words(some: frozenset[str]) -> str:
    return "-".join(sorted(some)) or "plain"
