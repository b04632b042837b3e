"""Writes the canonical configuration, which engines read in the place of the adapter's own `adapter_config.json`.

Runs in the reading process, once for each adapter, and in the API server for converted adapters and mixtures. In go a
parsed configuration and the pairs; out come the same ranks and alphas by patterns of names only (`with_exact_patterns`)
and the bytes of the file (`canonical_bytes`), with known keys only.

An adapter's own configuration may have anything under unknown keys, and regular expressions of its author. vLLM parses
everything at each load, in the engine. So the store keeps the canonical file under the name that vLLM reads
(`PEFTHelper.from_local_dir`, 0.30 to 0.33), and the original beside (`ORIGINAL_CONFIG_FILE`).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from lora_plugins.adapter.config import LAYOUT_KEY, OUR_KEY, AdapterConfig
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.patterns import MAX_PATTERN_CHARACTERS
from lora_plugins.adapter.weights import LoraPair, parameter_of

_T = TypeVar("_T", int, float)
_MAX_TARGETS_CHARACTERS = 1 << 16


def with_exact_patterns(config: AdapterConfig, pairs: Iterable[LoraPair]) -> AdapterConfig:
    """Return the configuration with patterns of names only, which give each pair's module the pair's rank and alpha."""
    ranks, alphas = {}, {}
    for pair in paced(pairs):
        name = parameter_of(pair.module)
        ranks[name], alphas[name] = pair.rank, pair.alpha
    return replace(config, rank_pattern=_patterns(ranks, config.rank), alpha_pattern=_patterns(alphas, config.alpha))


def canonical_bytes(config: AdapterConfig) -> bytes:
    """Return the text of `adapter_config.json` with the keys that `parse_config` has read, and nothing else.

    Very long `target_modules` become null: vLLM requires the key, and does not compare the value.
    """
    targets = config.targets if isinstance(config.targets, str) else sorted(config.targets or ())
    is_long = sum(map(len, targets)) > _MAX_TARGETS_CHARACTERS
    keys: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": config.base_model,
        "r": config.rank,
        "lora_alpha": _plain(config.alpha),
        "target_modules": None if config.targets is None or is_long else targets,
        "bias": "none",  # vLLM refuses others; biases that our workers add are in `config.beside`
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": {name: _plain(alpha) for name, alpha in config.alpha_pattern.items()},
        "modules_to_save": sorted(config.modules_to_save) or None,
    }
    if config.token_ids:  # vLLM passes over the key, and our workers read it
        keys["trainable_token_indices"] = config.token_ids.get("", config.token_ids)
    if config.beside:
        keys[OUR_KEY] = sorted(config.beside)
    if config.peft_version is not None:
        keys[LAYOUT_KEY] = ".".join(map(str, config.peft_version))
    return json.dumps(keys, indent=2).encode()


def _plain(number: float) -> float:
    # Write whole alphas as integers, as PEFT writes: below 2⁵³ a float has the same value.
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else number


def _patterns(values: Mapping[str, _T], usual: _T) -> dict[str, _T]:
    """Return patterns that give each name its value, except for names with the value `usual`, which need no pattern.

    The patterns are few, each with many names as alternatives: vLLM tries each pattern on each module.
    """
    by_leaf: dict[str, dict[str, _T]] = defaultdict(dict)  # by the last part of a module's name
    for name, value in values.items():
        by_leaf[name.rpartition(".")[2]][name] = value
    # If all modules with one last part (`q_proj`) have one value, the last part stands for their names.
    named: dict[str, _T] = {}
    for leaf, modules in by_leaf.items():
        of_leaf = set(modules.values())
        named |= modules if len(of_leaf) > 1 else {leaf: of_leaf.pop()}
    named = {name: value for name, value in named.items() if value != usual}
    if not named:
        return {}
    # The first matching pattern decides, and a pattern matches every longer name with the same end: a longer name with
    # another value needs an earlier pattern.
    longer = {
        name: value for name, value in values.items() if any(values.get(end, value) != value for end in _ends(name))
    }
    patterns = {re.escape(name): longer[name] for name in sorted(longer, key=len, reverse=True)}
    by_value: dict[_T, list[str]] = defaultdict(list)
    for name, value in named.items():
        if name not in longer:
            by_value[value].append(re.escape(name))
    for value, names in by_value.items():
        patterns |= dict.fromkeys(_joined(names), value)
    return patterns


def _ends(name: str) -> Iterator[str]:
    """Yield the ends of a name behind each of its dots."""
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _joined(names: Iterable[str]) -> Iterator[str]:
    """Yield alternatives as patterns, each at most as long as a pattern may be."""
    pattern = ""
    for name in names:
        if pattern and len(pattern) + len(name) >= MAX_PATTERN_CHARACTERS:
            yield pattern
            pattern = ""
        pattern = f"{pattern}|{name}" if pattern else name
    if pattern:
        yield pattern
