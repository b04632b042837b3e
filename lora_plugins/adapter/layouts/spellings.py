"""Other spellings of all names of an adapter: without wrappers, under another prefix, a head by PEFT's name.

A spelling holds only where every tensor then lands and fits, and no other spelling of the same kind does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lora_plugins.adapter.landing import Respell
from lora_plugins.adapter.layouts.names import Names
from lora_plugins.adapter.pace import paced
from lora_plugins.adapter.weights import LoraPair
from lora_plugins.adapter.writers import in_words, unwrapped, wrappers_in

_MODEL = "model."
_TINKERS_HEAD = re.compile(r"\b(model\.)?unembed_tokens$")  # `build_name_remaps` of tinker-cookbook has the same step
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<layers>[^.]+)\.\d+\.")


@dataclass(frozen=True, slots=True)
class Spelling:
    """Another spelling of names, and its description."""

    respell: Respell
    text: str


def spellings(left: Sequence[LoraPair], landed: Sequence[LoraPair], names: Names) -> Iterator[list[Spelling]]:
    """Yield spellings of the names that land nowhere, by kinds; of a kind at most one spelling holds.

    Args:
        left: pairs that land nowhere.
        landed: the other pairs of the adapter.
        names: where names land.
    """
    wrappers = wrappers_in(pair.module for pair in left)
    texts = [f"{in_words(wrappers)} taken out of keys"] if wrappers else []
    inner: Respell = unwrapped if wrappers else str
    if any(_TINKERS_HEAD.search(pair.module) for pair in left):
        texts.append("Tinker's 'unembed_tokens' is now 'lm_head'")
        inner = _then(inner, partial(_TINKERS_HEAD.sub, "lm_head"))
    if texts:
        yield [Spelling(inner, ", ".join(texts))]
    if any(_numbered(pair.module) for pair in landed) or any(names.is_unadapted(pair) for pair in left):
        return  # the adapter has this model's names, and further modules
    modules = [inner(pair.module) for pair in left]
    yield [
        Spelling(_then(inner, partial(_moved, old, new)), ", ".join([*texts, _moved_text(old, new)]))
        for old, new in _prefixes(modules, names)
    ]


def _then(first: Respell, second: Respell) -> Respell:
    return lambda module: second(first(module))


def _numbered(module: str) -> re.Match[str] | None:
    return _NUMBERED.match(module)


def _prefixes(modules: Sequence[str], names: Names) -> Iterator[tuple[str, str]]:
    """Yield prefixes of an adapter's names (`AutoModel`, a text model), each with a prefix of the engine's names."""
    found = [match for module in modules if (match := _numbered(module))]
    old = {match["prefix"] for match in found}
    if old != {_MODEL}:
        yield "", _MODEL
    if old in ({""}, {_MODEL}):
        layers = {match["layers"] for match in found}
        (before,) = old
        others = (_numbered(name) for name in paced(names.all))
        known = {match["prefix"] for match in others if match and match["layers"] in layers}
        yield from ((before, new) for new in sorted(known - {before}) if (before, new) != ("", _MODEL))


def _moved(old: str, new: str, module: str) -> str:
    """Return the name below the other prefix; a head is beside `model.`, not below."""
    if module.startswith(old):
        return new + module.removeprefix(old)
    return new.removesuffix(_MODEL) + module


def _moved_text(old: str, new: str) -> str:
    return f"'{old}' in keys is now '{new}'" if old else f"'{new}' put before keys"
