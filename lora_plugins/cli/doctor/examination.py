"""All checks, in the order in which a server meets what they look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_plugins.cli.doctor.findings import Finding
from lora_plugins.cli.doctor.installation import check_plugin_names, check_vllm, plugin_names
from lora_plugins.cli.doctor.places import check_policy, check_store
from lora_plugins.cli.doctor.plugins import Surroundings, check_plugins
from lora_plugins.cli.doctor.variables import check_variables
from lora_plugins.vllm_patches import ledger_check


def examine(env: Mapping[str, str], *, network: bool = True, timeout_s: float = 5.0) -> Iterator[Finding]:
    """Look at an environment as a server's start would; `timeout_s` bounds each question to a remote source."""
    yield from check_vllm(ledger_check.installed())
    wrong, settings = check_variables(env)
    yield from wrong
    discovered = plugin_names()
    yield from check_plugin_names(env, discovered)
    yield from check_plugins(Surroundings(env, settings, discovered, network, timeout_s))
    yield from check_store(settings)
    yield check_policy(settings)
