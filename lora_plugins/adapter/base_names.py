"""Compares two names of base models: the name in an adapter's configuration, and a name of the served model.

`fit.py` calls these functions in the API server, and the command line in its own process. In go two names, each
a Hub id or a path. `is_same_model` answers whether both mean one model; `differences` says in words how two models
differ by their names, for a warning.

No list of models is kept. A name is the words, numbers and size of its last part, without parts that name the storage
of weights or the publisher. Two names are compared if they share a word, or if both have a size; any other name may be
a folder's.
"""

from __future__ import annotations

import functools
import os
import re
from contextlib import suppress
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

_LONGEST = 200  # characters; of a longer name, no words and no size are read
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
# The Hub's cache: models--<org>--<name>/snapshots/<commit>
_HUB_CACHE = re.compile(r"(?:^|/)models--(?P<repo>[^/]+)/snapshots/[0-9a-f]{7,64}/?$")

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
# Words that many models have in their names: sharing only these says nothing.
_COMMON = {"base", "model", "instruct", "it", "chat", "checkpoint", "step", "final", "merged"}


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form `organisation/model` of the Hub."""
    return _HUB_ID.fullmatch(name) is not None


def is_same_model(one: str, other: str) -> bool:
    """Whether two names mean the same model.

    A Hub id equals its snapshot in a cache, and a local copy under the id's last part; two Hub ids must be equal.
    """
    one, other = _without_cache(one), _without_cache(other)
    if not one or not other:
        return False
    if os.path.isabs(one) and os.path.isabs(other) and os.path.realpath(one) == os.path.realpath(other):
        return True
    if is_hub_id(one) and is_hub_id(other):
        return _with_points(one).lower() == _with_points(other).lower()
    # At least one of the two is a path: compare last parts, as a download keeps the repository's name.
    return last_part(one).lower() == last_part(other).lower()


def shown(name: str) -> str:
    """Return a name for clients: a Hub id unchanged, and only the last part of a path, of Linux or Windows."""
    return last_part(name) if os.path.isabs(name) or "\\" in name or name.count("/") != 1 else name


def differences(one: str, other: str) -> tuple[str, ...] | None:
    """Return in words how two named models differ, by name and by size; `()` where they agree.

    None where the names say too little to compare them, as with a folder's name.
    """
    words, size, size_text = _read(one, _organisation(other))
    other_words, other_size, other_text = _read(other, _organisation(one))
    # A size of 0 is unknown.
    found = [f"another size ({size_text}, not {other_text})"] if size and other_size and size != other_size else []
    known, other_known = _telling(words, size), _telling(other_words, other_size)
    # Compare names only if they share a telling word, or both have telling words and a size.
    if not (known & other_known or (known and other_known and size and other_size)):
        return tuple(found) or None
    first = [word for word in words if word not in other_words]
    second = [word for word in other_words if word not in words]
    # A number that one of the two names leaves out is no difference; `3-1` and `3.1` are one number.
    is_other = (first and second) or any(map(str.isalpha, first + second))
    if is_other and "".join(words).replace(".", "") != "".join(other_words).replace(".", ""):
        found.insert(0, f"another name ({'-'.join(first) or 'plain'}, not {'-'.join(second) or 'plain'})")
    return tuple(found)


def other_type(name: str, model_type: str) -> str:
    """Return the other model type that a name shows; empty where it shows `model_type`, or no known type.

    Known are the types of Transformers. An empty `model_type` is unknown, and agrees with every name.
    """
    words = _read(name)[0]
    found = []
    # A type in Transformers may have its number in the same word: `qwen` and `3` of a name are the type `qwen3`.
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


def _without_cache(name: str) -> str:
    """Return the Hub id of a snapshot in the Hub's cache; any other name as it is, without slashes at the end."""
    cached = _HUB_CACHE.search(name)
    return cached["repo"].replace("--", "/", 1) if cached else name.rstrip("/")


def last_part(name: str) -> str:
    """Return the name without organisation, directory (also of Windows) or the Hub's cache."""
    return _with_points(_without_cache(name.replace("\\", "/")).rpartition("/")[2])


def _with_points(name: str) -> str:
    """Return a name with the points for which ModelScope's client writes three underscores in names of folders."""
    return name.replace("___", ".")


@functools.lru_cache(maxsize=4096)
def _read(name: str, organisation: str = "") -> tuple[tuple[str, ...], int, str]:
    """Return a name's words and numbers, and its size: in thousands of parameters, and as written; 0 and "" for none.

    A folder's name may begin with the organisation (`mistralai_Mistral-7B-v0.3`), which is left out if it is
    `organisation`.
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


@functools.lru_cache(maxsize=4096)
def _is_type(word: str) -> bool:
    """Whether the installed Transformers has language models of this type, by its files: importing takes seconds."""
    transformers = find_spec("transformers")
    for folder in (transformers and transformers.submodule_search_locations) or ():
        with suppress(OSError):
            code = Path(folder, "models", word, f"modeling_{word}.py").read_text(encoding="utf-8")
            # A model that makes text: other models (of images, of audio) have types too.
            return re.search(r"class \w+ForCausalLM\(\w+PreTrainedModel", code) is not None
    return False


def _telling(words: tuple[str, ...], size: int) -> set[str]:
    """Return the words that tell a model from others; none for a name without a number, as a folder `falcon` may be."""
    has_number = size or not all(map(str.isalpha, words))
    return {word for word in words if word.isalpha() and len(word) > 1} - _COMMON if has_number else set()


def _organisation(name: str) -> str:
    """Return the organisation of a Hub id; empty for any other name."""
    return name.partition("/")[0] if name.count("/") == 1 else ""
