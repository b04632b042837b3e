"""Every variable that cannot be right, not only the first one, and the settings that are left without them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from lora_plugins.cli.doctor.findings import Finding, State, problem_of
from lora_plugins.errors import InvalidSettings
from lora_plugins.resolvers.uris import AllowedUris
from lora_plugins.settings import OWN_VARIABLES, Settings

_PREFIX = "LORA_PLUGINS_"
_VLLMS = ("VLLM_LORA_RESOLVER_CACHE_DIR",)


def check_variables(env: Mapping[str, str]) -> tuple[list[Finding], Settings]:
    """What is wrong with single variables, and the settings of the others."""
    findings = []
    right = dict(env)
    for name in sorted(env):
        if name.startswith(_PREFIX) and name not in OWN_VARIABLES:
            close = get_close_matches(name, sorted(OWN_VARIABLES), n=1)
            remedy = f"did you mean {close[0]}?" if close else f"unset {name}"
            findings.append(Finding("settings", State.PROBLEM, f"the unknown variable {name}: the start ends", remedy))
            del right[name]
        elif name in OWN_VARIABLES or name in _VLLMS:
            try:
                AllowedUris.parse(Settings.from_env({name: env[name]}).allowed_uris)
            except InvalidSettings as error:
                findings.append(problem_of("settings", error))
                del right[name]
    if not findings:
        ours = [name for name in env if name in OWN_VARIABLES]
        findings.append(Finding("settings", State.OK, ", ".join(sorted(ours)) or "all at their defaults"))
    return findings, Settings.from_env(right)
