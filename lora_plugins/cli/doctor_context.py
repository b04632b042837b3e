"""The doctor's view of this environment, and the findings that its checks make.

Runs in the process of `doctor`. In: the environment's variables and the installed packages; no vLLM is imported, and no
server is asked. Out: a `Context`, which `doctor.py` gives to every check of `checks.py` and `source_checks.py`; a check
yields `Step` objects, whose name of the check `doctor.py` fills in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from lora_plugins.errors import InvalidSettings
from lora_plugins.findings import State, Step, at_start
from lora_plugins.kernels import dispatch
from lora_plugins.kernels.compiled import build
from lora_plugins.plugin_names import EVERYTHING, KERNELS, OTHERS, RESOLVERS
from lora_plugins.resolvers.sources.uri import AllowedUris
from lora_plugins.settings import (
    NEEDS,
    VARIABLES,
    Settings,
    is_unknown,
    named_in_environment,
    names_of_plugins,
    unknown_variable,
)
from lora_plugins.vllm_patches import vllm_releases

_LORA_OPS = ("vllm", "lora", "ops", "torch_ops", "lora_ops.py")
_SHOWN = 3

ok, on, off = (partial(Step, "", state) for state in (State.OK, State.ON, State.OFF))
warning, problem = partial(Step, "", State.WARNING), partial(Step, "", State.PROBLEM)


@dataclass(frozen=True)
class Context:
    """The checks' view of the environment.

    Attributes:
        env: the environment. discovered: the entry point values that vLLM would find, by plugin.
        vllm: the directory of its sources; None where vLLM is not installed.
        network: whether remote sources are asked. timeout_s: the limit of an answer.
    """

    env: Mapping[str, str]
    discovered: Mapping[str, Sequence[str]]
    vllm: Path | None
    network: bool
    timeout_s: float

    @cached_property
    def wrong(self) -> Mapping[str, InvalidSettings]:
        """The errors of single variables, of all variables and not only the first."""
        found = {}
        for name in sorted(self.env):
            try:
                # `Settings.from_env` stops at the first error, and the doctor shows all.
                if is_unknown(name):
                    raise unknown_variable(name)
                if name in VARIABLES:
                    value = VARIABLES[name].value(self.env[name])
                    if name == "LORA_PLUGINS_ALLOWED_URIS":
                        AllowedUris.parse(value)
            except InvalidSettings as error:
                found[name] = error
        return found

    @cached_property
    def settings(self) -> Settings:
        return Settings.from_env({name: text for name, text in self.env.items() if name not in self.wrong})

    @property
    def is_cpu(self) -> bool:
        return self.vllm is not None and "+cpu" in vllm_releases.installed_version(self.vllm)

    @cached_property
    def choice(self) -> dispatch.Choice:
        """The kernels that `lora_kernels` would choose here.

        Raises:
            InvalidSettings: the chosen kernels cannot be had here.
        """
        machine = dispatch.Machine("cpu" if self.is_cpu else "cuda", dispatch.triton_is_there(), build.problem)
        return dispatch.choose(self.settings.kernels, machine)

    def at_start(self, check: str) -> list[Step]:
        """Return the warnings of a server's start that belong to a check."""
        return [finding for finding in self._at_start if finding.check == check]

    @cached_property
    def _at_start(self) -> Sequence[Step]:
        return list(at_start(self.settings, self.env, base_rows_get_an_adapter=self._base_rows_get_an_adapter()))

    def _base_rows_get_an_adapter(self) -> bool:
        if self.vllm is None or not self.is_cpu or "VLLM_PLUGINS" not in self.env:
            return False
        with suppress(InvalidSettings, OSError, SyntaxError):  # another check reports it
            if not self.why_off(KERNELS) and self.choice.wrapper is not None:
                return False
            return dispatch.base_rows_get_an_adapter(self.vllm.joinpath(*_LORA_OPS).read_text(encoding="utf-8"))
        return False

    def why_off(self, plugin: str) -> str:
        """Return why a plugin does not run, or nothing."""
        if "VLLM_PLUGINS" not in self.env:
            return "VLLM_PLUGINS is unset"
        if named_in_environment(plugin, self.env):
            return ""
        return f"{NEEDS[plugin]} is unset" if self.names(EVERYTHING) else "VLLM_PLUGINS does not name it"

    def names(self, plugin: str) -> bool:
        """Return whether `VLLM_PLUGINS` has this very name."""
        return plugin in names_of_plugins(self.env)

    @property
    def has_a_source(self) -> bool:
        """Whether a source is named, and has its variable."""
        named = [plugin for plugin in RESOLVERS if not self.why_off(plugin)]
        return OTHERS in named or any(self.env.get(NEEDS[plugin]) for plugin in named)


Check = Callable[[Context], Iterator[Step]]


def some_of(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
