"""Every variable that cannot be right, not only the first one, and the settings that are left without them."""

from __future__ import annotations

from collections.abc import Mapping

from lora_plugins.cli.doctor.findings import Finding, State, problem_of
from lora_plugins.errors import InvalidSettings
from lora_plugins.resolvers.sources.uri import AllowedUris
from lora_plugins.settings import OWN_VARIABLES, VARIABLES, Settings, is_unknown, unknown_variable


def check_variables(env: Mapping[str, str]) -> tuple[list[Finding], Settings]:
    """What is wrong with single variables, and the settings of the others."""
    findings = []
    right = dict(env)
    for name in sorted(env):
        try:
            if name in VARIABLES:
                value = VARIABLES[name].value(env[name])
                if name == "LORA_PLUGINS_ALLOWED_URIS":
                    AllowedUris.parse(value)
            elif is_unknown(name):
                findings.append(_unknown(name))
                del right[name]
        except InvalidSettings as error:
            findings.append(problem_of("settings", error))
            del right[name]
    if not findings:
        ours = [name for name in env if name in OWN_VARIABLES]
        findings.append(Finding("settings", State.OK, ", ".join(sorted(ours)) or "all at their defaults"))
    return findings, Settings.from_env(right)


def _unknown(name: str) -> Finding:
    error = unknown_variable(name)
    return Finding("settings", State.PROBLEM, f"{error.found}: startup fails", error.remedy)
