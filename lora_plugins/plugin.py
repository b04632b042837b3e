"""The functions behind our entry points, and nothing else; vLLM calls them in every process of a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from multiprocessing import parent_process

from lora_plugins.errors import InvalidSettings
from lora_plugins.findings import discovered_plugins, misspelt_variables, unknown_plugins
from lora_plugins.log import logger
from lora_plugins.plugin_names import ADMIN, EVERYTHING, FILESYSTEM, HUB, KERNELS, MANAGER, OTHERS, OURS, S3
from lora_plugins.process import Process, this_process
from lora_plugins.resolvers.sources.configured import filesystem_source, hub_source, s3_source, sources_of_others
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.settings import Settings, environment, named_in_environment, names_of_plugins
from lora_plugins.vllm_patches import installation, kv_connectors, ray_environment, versions
from lora_plugins.vllm_patches.api_server import lora_resolver, serve_command

_FILESYSTEM_BUILTIN = ("vllm.plugins.lora_resolvers.filesystem_resolver", "register_filesystem_resolver")
_HUB_BUILTIN = ("vllm.plugins.lora_resolvers.hf_hub_resolver", "register_hf_hub_resolver")


def register_filesystem_resolver() -> None:
    """Entry point `lora_filesystem_resolver`: serve adapters from `VLLM_LORA_RESOLVER_CACHE_DIR`.

    Where `VLLM_PLUGINS` does not name the plugin, vLLM's builtin of the same name runs as if we were not installed.

    Raises:
        InvalidSettings: the directory does not exist, a `LORA_PLUGINS_*` variable cannot be right, or vLLM is a
        release that we do not know, here as in all functions below.
    """
    if not named_in_environment(FILESYSTEM):
        lora_resolver.builtin(*_FILESYSTEM_BUILTIN)()
        return
    _serve(partial(filesystem_source, may_lead=this_process().may_lead))


def register_s3_resolver() -> None:
    """Entry point `lora_s3_resolver`: serve adapters from `S3_PATH_TEMPLATE`, an S3 or any other fsspec URL.

    Raises:
        InvalidSettings: the template, or a variable of ours or of the object store, cannot be right.
    """
    if named_in_environment(S3):
        _serve(s3_source)


def register_hf_hub_resolver() -> None:
    """Entry point `lora_hf_hub_resolver`: serve adapters from the repositories of `VLLM_LORA_RESOLVER_HF_REPO_LIST`.

    Where `VLLM_PLUGINS` does not name the plugin, vLLM's builtin of the same name runs as if we were not installed.

    Raises:
        InvalidSettings: the list, or a `LORA_PLUGINS_*` variable, cannot be right.
    """
    if not named_in_environment(HUB):
        lora_resolver.builtin(*_HUB_BUILTIN)()
        return
    _serve(hub_source)


def register_other_sources() -> None:
    """Entry point `lora_sources`: serve adapters from the sources of other packages (group `lora_plugins.sources`).

    Raises:
        InvalidSettings: a source cannot be made, or a `LORA_PLUGINS_*` variable cannot be right.
    """
    if named_in_environment(OTHERS):
        for source in sources_of_others(_checked_process().settings):
            _serve_from(source)


def register_lru_manager() -> None:
    """Entry point `lora_lru_manager`: the scheduler plans which adapters are loaded and run, workers follow the plan.

    Raises:
        InvalidSettings: a `LORA_PLUGINS_*` variable cannot be right.
    """
    if named_in_environment(MANAGER):
        installation.install_manager(_checked_process())
        _set_environment()


def register_kernels() -> None:
    """Entry point `lora_kernels`: compute adapters with our kernels, chosen by `LORA_PLUGINS_KERNELS`.

    Raises:
        InvalidSettings: the kernels asked for cannot be had here, or a `LORA_PLUGINS_*` variable cannot be right.
    """
    if named_in_environment(KERNELS):
        installation.install_kernels(_checked_process())
        _set_environment()


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


_REGISTER = {
    FILESYSTEM: register_filesystem_resolver,
    S3: register_s3_resolver,
    HUB: register_hf_hub_resolver,
    OTHERS: register_other_sources,
    MANAGER: register_lru_manager,
    KERNELS: register_kernels,
    ADMIN: register_admin,
}


def _serve(configured: Callable[[Settings], Source | None]) -> None:
    process = _checked_process()
    source = configured(process.settings)
    if source is not None:
        _serve_from(source)


def _serve_from(source: Source) -> None:
    process = this_process()
    installation.install_resolver(process)
    process.add_source(source)
    _set_environment()


def _checked_process() -> Process:
    """Return this process's state; startup fails here where a variable, vLLM or the server cannot be right."""
    process = this_process()
    versions.require_known(untested_is_allowed=process.settings.untested_vllm)
    serve_command.patch(process.settings)
    kv_connectors.patch()
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


def _set_environment() -> None:
    """Pass our settings to processes that Ray starts, but for settings that only an API server needs."""
    ray_environment.name_our_variables()
    ray_environment.keep_keys_from_workers()


# At import: before any of our functions can raise.
serve_command.say_errors_in_a_line()
# At import: vLLM imports its builtins and our functions first, and may then call the builtin of the same name.
if named_in_environment(FILESYSTEM):
    lora_resolver.take_over(*_FILESYSTEM_BUILTIN, register_filesystem_resolver)
if named_in_environment(HUB):
    lora_resolver.take_over(*_HUB_BUILTIN, register_hf_hub_resolver)
