"""The last line of `doctor`: what a server with this environment would serve, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_plugins.cli.doctor.findings import Finding, State

_SOURCES = ("filesystem", "s3", "hub")
_NOTHING = "nothing is served by lora-plugins"


def verdict(found: Sequence[Finding], env: Mapping[str, str]) -> str:
    """What is served by lora-plugins, or what first keeps it from serving."""
    problems = [item for item in found if item.state is State.PROBLEM and not item.check.startswith("server")]
    vllm = next((item for item in problems if item.check == "vllm"), None)
    if vllm is not None:
        return f"{_NOTHING}: {vllm.found}"
    if "VLLM_PLUGINS" not in env:
        return f"{_NOTHING}: set VLLM_PLUGINS"
    states = {item.check: item.state for item in found}
    runtime = states.get("runtime")
    sources = [check for check in _SOURCES if states.get(check) in (State.ON, State.WARNING) and _runs(found, check)]
    has_admin = states.get("admin") is State.ON
    if problems:
        first = next((item for item in problems if item.check in ("settings", "plugins")), problems[0])
        return f"not all that is asked for is served: first mend '{first.check}'"
    if not sources and not has_admin:
        return f"{_NOTHING} by name: VLLM_PLUGINS names no source of adapters"
    if sources and runtime is not State.ON:
        return f"{_NOTHING} by name: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    where = f"adapters are served by name from {', '.join(sources)}" if sources else "adapters are served by URI alone"
    return f"{where}; {'with' if has_admin else 'without'} the admin API"


def _runs(found: Sequence[Finding], check: str) -> bool:
    """Whether a source runs at all: a warning may say that it is set and off."""
    return not any(item.check == check and item.found.startswith("off:") for item in found)
