"""Compares the names of two base models, after plain normalisation: no list of models.

A name is the words, numbers and size of its last part. How weights are stored, and who published the model, is no
difference. Two names are compared if they share a word, or if both have a size; any other name may be a folder's.
"""

from __future__ import annotations

import functools
import os
import re
from contextlib import suppress
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

_LONGEST = 200  # a longer name is not read
# The Hub's cache: models--<org>--<name>/snapshots/<commit>
HUB_CACHE = re.compile(r"(?:^|/)models--(?P<repo>[^/]+)/snapshots/[0-9a-f]{7,64}/?$")

# Parts that name the storage of weights, or the publisher: the model is the same. Q4_K_M, W8A8, g128, 4bit, bf16 …
_STORED = re.compile(
    r"(?<![a-z0-9])(?:i?q\d(?:-[k01])?(?:-(?:xl|l|m|s|xs|xxs|nl))?|w\d+a\d+|gs?\d+|\d+g|int\d|\d+-?bits?|b?fp?\d+|"
    r"b?float\d+|(?:nv|mx)fp\d|nf4|e4m3|e5m2|exl\d|auto-?(?:awq|gptq|round)|awq|gptq(?:model)?|hqq|aqlm|eetq|marlin|"
    r"quark|torchao|bnb|bitsandbytes|dynamic|kv|block|quant(?:ized)?|qat|gguf|ggml|mlx|onnx|safetensors|hf|half|"
    r"sharded|unsloth|meta|original|transformers|local|copy|a?sym)(?![a-z0-9])"
)
_SIZE = re.compile(  # 8b, 0.5b, 500m, 8x7b
    r"(?<![a-z0-9.])(?:(?P<times>\d+)x)?(?P<number>\d+(?:\.\d+)?)(?P<unit>[bm])(?![a-z0-9])"
)
_WORD = re.compile(r"(?:(?<![a-z])[a-z])?\d+(?:\.\d+)*(?:[a-z](?![a-z]))?|[a-z]+")  # llama, 3.1, v0.3, 128k, a3b
# Names that share such a word alone may be of anything.
_COMMON = {"base", "model", "instruct", "it", "chat", "checkpoint", "step", "final", "merged"}


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
def _read(name: str, organisation: str = "") -> tuple[tuple[str, ...], int, str]:
    """Return a name's words and numbers, and its size: in thousands of parameters, and as written.

    A folder's name may begin with the organisation (`mistralai_Mistral-7B-v0.3`).
    """
    text = last_part(name).lower()
    if len(text) > _LONGEST:
        return (), 0, ""
    first, _, rest = text.partition("_")
    text = rest if first == organisation.lower() and rest[:1].isalpha() else text
    text = _STORED.sub("-", text.replace("_", "-").replace(" ", "-"))
    words = tuple(dict.fromkeys(_WORD.findall(_SIZE.sub("-", text))))
    if (size := _SIZE.search(text)) is None:
        return words, 0, ""
    thousands = float(size["number"]) * (1_000_000 if size["unit"] == "b" else 1000)
    return words, int(size["times"] or 1) * round(thousands), size[0]


def differences(one: str, other: str) -> tuple[str, ...] | None:
    """Return in words how two named models differ: by name, by size; None where the names say too little."""
    ours, size, size_text = _read(one, _organisation(other))
    theirs, other_size, other_text = _read(other, _organisation(one))
    found = [f"another size ({size_text}, not {other_text})"] if size and other_size and size != other_size else []
    known, other_known = _telling(ours, size), _telling(theirs, other_size)
    if not (known & other_known or (known and other_known and size and other_size)):
        return tuple(found) or None
    first = [word for word in ours if word not in theirs]
    second = [word for word in theirs if word not in ours]
    # A number that one of the two names leaves out is no difference; `3-1` and `3.1` are one number.
    is_other = (first and second) or any(map(str.isalpha, first + second))
    if is_other and "".join(ours).replace(".", "") != "".join(theirs).replace(".", ""):
        found.insert(0, f"another name ({'-'.join(first) or 'plain'}, not {'-'.join(second) or 'plain'})")
    return tuple(found)


def other_type(name: str, model_type: str) -> str:
    """Return the model type in a name, where Transformers knows the type and it is not `model_type`; empty else."""
    words = _read(name)[0]
    found = []
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        number = after.partition(".")[0]
        number = number if number.isdigit() else ""
        if number and _is_type(word + number):
            found.append(word + number)
        # Falcon3 is no `falcon`: a word without its number counts where types of the word are numbered.
        elif _is_type(word) and (not number or any(_is_type(f"{word}{n}") for n in range(2, 10))):
            found.append(word)
    is_of_type = not model_type or any(one in model_type or model_type in one for one in found)
    return "" if is_of_type else "-".join(found)


@functools.lru_cache(maxsize=4096)
def _is_type(word: str) -> bool:
    """Whether the installed Transformers has language models of this type, by its files: importing takes seconds."""
    transformers = find_spec("transformers")
    for folder in (transformers and transformers.submodule_search_locations) or ():
        with suppress(OSError):
            code = Path(folder, "models", word, f"modeling_{word}.py").read_text(encoding="utf-8")
            return re.search(r"class \w+ForCausalLM\(\w+PreTrainedModel", code) is not None
    return False


def _telling(words: tuple[str, ...], size: int) -> set[str]:
    """Return the words by which a model may be known; none without a number, as in `falcon`, which may be a folder."""
    has_number = size or not all(map(str.isalpha, words))
    return {word for word in words if word.isalpha() and len(word) > 1} - _COMMON if has_number else set()


def _organisation(name: str) -> str:
    return name.partition("/")[0] if name.count("/") == 1 else ""
