"""Findings about an environment: misspelt plugins and variables, and settings that keep each other from working.

`lora-plugins doctor` shows all findings, and `lora-plugins why` shows its steps in the same form; a server logs only
warnings and problems as it starts. In go the environment and the settings, out come `Step`s.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import entry_points
from typing import NamedTuple

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.plugin_names import EVERYTHING, FILESYSTEM, KERNELS, OURS, PLUGIN_GROUPS
from lora_plugins.settings import VARIABLES, Settings, named_in_environment, names_of_plugins
from lora_plugins.variables import PREFIX, closest

_SHARED = ("lora", "resolver", "plugin", "plugins")  # words that most of our plugins' names have
_ALMOST = 0.85  # likeness of two names, 1 for equal names; no variable of vLLM itself is so like one of ours
_SHORT = {"fs": "filesystem", "huggingface": "hf"}  # other words for words of our plugins' names


class State(StrEnum):
    """`OK` and `ON` need no remedy, `OFF` is a choice; a `PROBLEM` keeps something that was asked for from working."""

    OK = "ok"
    ON = "on"
    OFF = "off"
    WARNING = "warning"
    PROBLEM = "problem"


class Step(NamedTuple):
    """One check, by name: what it found, and the remedy, empty where nothing is to be done.

    `state` is a `State`; for `why`, also `yes`, `no`, `no answer`, `not asked`, `not checked` or `failed`. The doctor
    fills in an empty `check`.
    """

    check: str
    state: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


def problem_of(error: LoRAPluginsError) -> Step:
    """Return an error as a problem, with an empty `check`."""
    expected = f"; expected {error.expected}" if error.expected else ""
    return Step("", State.PROBLEM, f"{error.found}{expected}", error.remedy)


def discovered_plugins() -> Mapping[str, Sequence[str]]:
    """Return every plugin that vLLM would discover: entry point values by name. Reads all installed packages."""
    found: dict[str, list[str]] = {}
    for group in PLUGIN_GROUPS:
        for point in entry_points(group=group):
            found.setdefault(point.name, []).append(point.value)
    return found


def unknown_plugins(env: Mapping[str, str], installed: Collection[str], *, only_ours: bool = False) -> Iterator[Step]:
    """Yield a step for each name in `VLLM_PLUGINS` of which vLLM loads nothing, without an error.

    With `only_ours`, only names that look like a name of this package.
    """
    for name in names_of_plugins(env):
        close, looks_like_ours = plugin_meant(name)
        if not name or name in installed or (only_ours and not looks_like_ours):
            continue
        if name.strip() in installed:
            # vLLM splits at commas and strips nothing (vllm/envs.py, 0.30 to 0.33).
            found = f"VLLM_PLUGINS names '{name}', and vLLM does not leave out the space: it is not loaded"
            yield Step("plugins", State.PROBLEM, found, "separate the names by commas alone")
            continue
        # Another package's plugin may be meant.
        close = close or (None if only_ours else closest(name.strip(), installed))
        found = f"VLLM_PLUGINS names '{name}', and no installed package has such a plugin"
        ours = f"correct or remove the name; lora-plugins has {EVERYTHING}, or {', '.join(OURS)}"
        remedy = f"did you mean {close}?" if close else ours if looks_like_ours else "correct or remove the name"
        yield Step("plugins", State.PROBLEM if looks_like_ours else State.WARNING, found, remedy)


def misspelt_variables(env: Mapping[str, str]) -> Iterator[Step]:
    """Yield a step for each variable with almost the name of a variable that we read.

    Names with our prefix are left out: reading the settings refuses an unknown `LORA_PLUGINS_*`.
    """
    for name in sorted(env):
        close = None if name in VARIABLES or name.startswith(PREFIX) else closest(name, VARIABLES, _ALMOST)
        if close:
            yield Step("settings", State.WARNING, f"{name} is set, and nothing reads it", f"did you mean {close}?")


def plugin_meant(name: str) -> tuple[str | None, bool]:
    """Return the plugin of this package that a name means, and whether the name looks like a name of this package.

    The plugin is None where it is not clear which plugin is meant.
    """
    folded = name.strip().casefold().replace("-", "_")
    if closest(folded, (EVERYTHING,), _ALMOST) is not None:
        return EVERYTHING, True
    # Most names share these words: only the other words tell plugins apart.
    words = [_SHORT.get(word, word) for word in folded.split("_") if closest(word, _SHARED) is None]
    if words:
        having = [plugin for plugin in OURS if set(words) <= set(plugin.split("_"))]
        if len(having) == 1:
            return having[0], True
    # Without our beginning, the first word must be like `lora`, or the whole name a part of a plugin's name.
    if not folded.startswith("lora_"):
        close = closest(folded, OURS) if closest(folded.split("_")[0], ("lora",)) else None
        return close, close is not None or (len(folded) > 1 and any(folded in plugin for plugin in OURS))
    by_words = {plugin.removeprefix("lora_").removesuffix("_resolver"): plugin for plugin in OURS}
    close = closest("_".join(words), by_words)
    return (None if close is None else by_words[close]), True


def at_start(settings: Settings, env: Mapping[str, str], *, base_rows_get_an_adapter: bool) -> Iterator[Step]:
    """Yield a server's warnings once the model is known; `unknown_plugins` warns of names of plugins.

    With `base_rows_get_an_adapter`, vLLM's own kernels run on the CPU and compute base-model rows with an adapter.
    """
    root = settings.filesystem_root
    if root is not None and named_in_environment(FILESYSTEM, env) and os.path.isfile(root / CONFIG_FILE):
        found = f"VLLM_LORA_RESOLVER_CACHE_DIR={root} is an adapter itself, and names are looked for below it"
        remedy = f"set VLLM_LORA_RESOLVER_CACHE_DIR={root.parent} to serve it as '{root.name}'"
        yield Step("filesystem", State.PROBLEM, found, remedy)
    yield from resolvers_not_asked(settings)
    if base_rows_get_an_adapter:
        yield Step(
            "kernels",
            State.WARNING,
            "on the CPU, vLLM before 0.33 computes base-model requests with an adapter when both share a batch "
            "(vllm-project/vllm#48421)",
            f"name {KERNELS} in VLLM_PLUGINS, without LORA_PLUGINS_KERNELS=vllm, or upgrade vLLM",
        )


def resolvers_not_asked(settings: Settings) -> Iterator[Step]:
    """Yield a problem if vLLM asks no resolver of any name."""
    if not settings.runtime_lora_updating:
        found = "vLLM asks no resolver: VLLM_ALLOW_RUNTIME_LORA_UPDATING is not 1"
        yield Step("runtime", State.PROBLEM, found, "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
