"""What is installed: vLLM in range, its symbols as our ledger has them, and our entry points where vLLM looks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_plugins.cli.doctor.findings import Finding, State, problem_of
from lora_plugins.ledger import check as ledger_check
from lora_plugins.ledger import symbols
from lora_plugins.plugin_names import OURS
from lora_plugins.spelling import closest
from lora_plugins.vllm_patches import versions

# Those that vLLM 0.30 to 0.33 read.
_GROUPS = (
    "vllm.general_plugins",
    "vllm.endpoint_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
_REINSTALL = "install lora-plugins again where vLLM is installed: pip install lora-plugins"


def check_vllm(sources: Path | None) -> Iterator[Finding]:
    """The version of vLLM's sources against those we know, and every symbol of the ledger; nothing is imported."""
    if sources is None:
        yield Finding("vllm", State.PROBLEM, "vLLM is not installed beside lora-plugins", "pip install vllm")
        return
    version = versions.installed_version(sources)
    error = versions.refusal(version)
    yield Finding("vllm", State.OK, f"vLLM {version}") if error is None else problem_of("vllm", error)
    noted = symbols()
    differing = [
        f"{symbol.name}: {difference}" for symbol in noted if (difference := ledger_check.check(symbol, sources))
    ]
    if differing:
        yield Finding(
            "ledger",
            State.PROBLEM,
            f"{len(differing)} of the {len(noted)} places where we touch vLLM differ: " + "; ".join(differing[:3]),
            "install a vLLM version that lora-plugins supports, without changes of its own",
        )
    else:
        yield Finding("ledger", State.OK, f"all {len(noted)} places where we touch vLLM are as they should be")


def is_cpu_build() -> bool | None:
    """Whether the installed vLLM is a build for the CPU; None where there is none."""
    sources = ledger_check.installed()
    return None if sources is None else "+cpu" in versions.installed_version(sources)


def plugin_names() -> Mapping[str, list[str]]:
    """Every plugin that vLLM would discover, by name: the values of its entry points."""
    found: dict[str, list[str]] = {}
    for group in _GROUPS:
        for point in importlib.metadata.entry_points(group=group):
            found.setdefault(point.name, []).append(point.value)
    return found


def is_ours(name: str, discovered: Mapping[str, list[str]]) -> bool:
    """Whether vLLM would discover our plugin of this name."""
    return any(value.startswith("lora_plugins.") for value in discovered.get(name, []))


def check_plugin_names(env: Mapping[str, str], discovered: Mapping[str, list[str]]) -> Iterator[Finding]:
    """What `VLLM_PLUGINS` names, against what is installed."""
    if "VLLM_PLUGINS" not in env:
        yield Finding(
            "plugins",
            State.OFF,
            "VLLM_PLUGINS is unset: vLLM loads every plugin, and all of lora-plugins stays out of the way",
            "name the plugins that are wanted in VLLM_PLUGINS, separated by commas",
        )
        return
    named = env["VLLM_PLUGINS"].split(",")
    wrong = [_wrong_name(name, discovered) for name in named if name and name not in discovered]
    yield from wrong
    if not wrong:
        yield Finding("plugins", State.OK, "VLLM_PLUGINS names " + (", ".join(filter(None, named)) or "none"))


def missing_entry_point(plugin: str) -> Finding:
    """The verdict on a plugin of ours that vLLM does not find."""
    return Finding(
        plugin, State.PROBLEM, "vLLM does not find this plugin: its entry point is not installed", _REINSTALL
    )


def _wrong_name(name: str, discovered: Mapping[str, list[str]]) -> Finding:
    if name.strip() in discovered:
        return Finding(
            "plugins",
            State.PROBLEM,
            f"VLLM_PLUGINS names '{name}', and vLLM does not leave out the space: it is not loaded",
            "separate the names by commas alone",
        )
    close = closest(name.strip(), {*OURS, *discovered})
    return Finding(
        "plugins",
        State.WARNING,
        f"VLLM_PLUGINS names '{name}', and no installed package has such a plugin",
        f"did you mean {close}?" if close else "correct or remove the name",
    )
