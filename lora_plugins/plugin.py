"""The functions behind our entry points: each checks its process, and installs the patches of one plugin.

vLLM imports this module and calls every function in each process of a server (API server, engine cores, workers),
before an engine is made. A function whose plugin `VLLM_PLUGINS` does not name changes nothing. At import, our
functions take the place of vLLM's builtin resolvers with the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from multiprocessing import parent_process

from lora_plugins.errors import InvalidSettings
from lora_plugins.findings import discovered_plugins, misspelt_variables, unknown_plugins
from lora_plugins.log import logger
from lora_plugins.plugin_names import ADMIN, EVERYTHING, KERNELS, MANAGER, OTHERS, OURS, RESOLVERS, SOURCES
from lora_plugins.process import Process, this_process
from lora_plugins.resolvers.sources.configured import sources_of
from lora_plugins.settings import environment, named_in_environment, names_of_plugins
from lora_plugins.vllm_patches import engine_args, installation, ray_environment, vllm_releases
from lora_plugins.vllm_patches.api_server import lora_resolver, serve_command

# Module and function of vLLM's own resolvers, by the plugin of ours with the same name.
_BUILTINS = {it.plugin: (it.builtin, it.plugin.replace("lora_", "register_", 1)) for it in SOURCES if it.builtin}


def _register_sources(plugin: str) -> None:
    """Serve adapters from the sources of a plugin.

    Where `VLLM_PLUGINS` does not name the plugin, vLLM's builtin of the same name runs as if we were not installed.

    Raises:
        InvalidSettings: the plugin's own setting or a `LORA_PLUGINS_*` variable cannot be right, or vLLM is a release
        that we do not know, here as in all functions below.
    """
    if named_in_environment(plugin):
        process = _checked_process()
        for source in sources_of(plugin, process.settings, process.may_lead):
            installation.install_resolver(process)
            process.add_source(source)
            ray_environment.patch()
    elif plugin in _BUILTINS:
        lora_resolver.builtin(*_BUILTINS[plugin])()


register_other_sources = partial(_register_sources, OTHERS)


def _register(plugin: str, install: Callable[[Process], None]) -> None:
    """Entry points `lora_lru_manager` and `lora_kernels`.

    With the first the scheduler plans which adapters are loaded and run, and workers follow the plan. The second
    computes adapters with our kernels, chosen by `LORA_PLUGINS_KERNELS`.

    Raises:
        InvalidSettings: the kernels asked for cannot be had here, or a `LORA_PLUGINS_*` variable cannot be right.
    """
    if named_in_environment(plugin):
        install(_checked_process())
        ray_environment.patch()


def register_admin() -> None:
    """Entry point `lora_admin`, the general half: `lora_plugins.endpoint_plugin` has the routes.

    Raises:
        InvalidSettings: `lora_lru_manager` is not named too, or a `LORA_PLUGINS_*` variable cannot be right.
    """
    if not named_in_environment(ADMIN):
        return
    process = _checked_process()
    if not named_in_environment(MANAGER):
        raise InvalidSettings(
            f"VLLM_PLUGINS with {ADMIN} and without {MANAGER}",
            expected="both, as only our manager can unload and swap while requests run",
            remedy=f"name {MANAGER} too",
        )
    installation.install_resolver(process)  # without a source among the plugins, adapters come from URIs only


def register_everything() -> None:
    """Entry point `lora_plugins`: all of the above, and of the sources those whose own variable is set.

    Raises:
        InvalidSettings: `VLLM_PLUGINS` names one of the above too, whose function vLLM calls itself; or as above.
    """
    if not named_in_environment(EVERYTHING):
        return
    names = names_of_plugins(environment())
    twice = [plugin for plugin in OURS if plugin in names]
    if twice:
        raise InvalidSettings(
            f"VLLM_PLUGINS with {EVERYTHING}, and with {' and '.join(twice)}",
            expected=f"{EVERYTHING} alone, which is all plugins of this package, or each plugin by its name",
            remedy=f"leave {' and '.join(twice)} out, or {EVERYTHING}",
        )
    for plugin, register in _REGISTER.items():
        if named_in_environment(plugin):
            register()


_REGISTER: Mapping[str, Callable[[], None]] = {
    **{plugin: partial(_register_sources, plugin) for plugin in RESOLVERS},
    MANAGER: partial(_register, MANAGER, installation.install_manager),
    KERNELS: partial(_register, KERNELS, installation.install_kernels),
    ADMIN: register_admin,
}


def __getattr__(name: str) -> Callable[[], None]:
    """Return the entry point of a plugin: `register_s3_resolver` of the plugin `lora_s3_resolver`."""
    plugin = name.replace("register_", "lora_", 1)
    if plugin not in _REGISTER:
        raise AttributeError(name)
    return _REGISTER[plugin]


def _checked_process() -> Process:
    """Return this process's state; startup fails here where a variable, vLLM or the server cannot be right."""
    process = this_process()
    vllm_releases.require_known(untested_is_allowed=process.settings.untested_vllm)
    serve_command.patch(process.settings)
    engine_args.patch()
    if parent_process() is None:  # engines and workers have the same environment
        _warn_of_misspellings()
    return process


@cache  # once, whichever plugins are named
def _warn_of_misspellings() -> None:
    """Log variables and names in `VLLM_PLUGINS` that look like ours, and are none."""
    for finding in misspelt_variables(environment()):
        logger.warning("%s", finding)
    # Reading the entry points of all packages takes a tenth of a second.
    if any(unknown_plugins(environment(), (*OURS, EVERYTHING), only_ours=True)):
        for finding in unknown_plugins(environment(), discovered_plugins(), only_ours=True):
            logger.warning("%s", finding)


# At import: before any of our functions can raise.
serve_command.say_errors_in_a_line()
# At import: vLLM imports its builtins and our functions first, and may then call the builtin of the same name.
for _plugin, _builtin in _BUILTINS.items():
    if named_in_environment(_plugin):
        lora_resolver.take_over(*_builtin, _REGISTER[_plugin])
