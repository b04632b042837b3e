"""The functions behind our entry points, and nothing else; vLLM calls them in every one of its processes."""

from __future__ import annotations

from lora_plugins import engine
from lora_plugins.errors import InvalidSettings
from lora_plugins.resolvers.filesystem import FilesystemSource
from lora_plugins.settings import Settings, named_in_environment

FILESYSTEM = "lora_filesystem_resolver"
S3 = "lora_s3_resolver"
HUB = "lora_hf_hub_resolver"
MANAGER = "lora_lru_manager"
KERNELS = "lora_kernels"

_FILESYSTEM_BUILTIN = ("vllm.plugins.lora_resolvers.filesystem_resolver", "register_filesystem_resolver")
_HUB_BUILTIN = ("vllm.plugins.lora_resolvers.hf_hub_resolver", "register_hf_hub_resolver")


def register_filesystem_resolver() -> None:
    """Entry point `lora_filesystem_resolver`: serve adapters from `VLLM_LORA_RESOLVER_CACHE_DIR`.

    Where `VLLM_PLUGINS` does not name it, vLLM's builtin of the same name runs as if we were not installed.

    Raises:
        InvalidSettings: the directory does not exist, or a `LORA_PLUGINS_*` variable cannot be right.
    """
    if not named_in_environment(FILESYSTEM):
        engine.builtin(*_FILESYSTEM_BUILTIN)()
        return
    settings = Settings.from_env()
    root = settings.filesystem_root
    if root is None:
        return
    if not root.is_dir():
        raise InvalidSettings(
            f"VLLM_LORA_RESOLVER_CACHE_DIR={str(root)!r}, which is no directory",
            expected="a directory of adapters",
            remedy="create it or correct the variable",
        )
    engine.serve_from(
        lambda executor: FilesystemSource(root, follow_symlinks=settings.follow_symlinks, executor=executor), settings
    )


def register_s3_resolver() -> None:
    """Entry point `lora_s3_resolver`: serve adapters from `S3_PATH_TEMPLATE`, an S3 or any other fsspec URL.

    Raises:
        InvalidSettings: the template, or a variable of ours or of the object store, cannot be right.
    """
    if not named_in_environment(S3):
        return
    settings = Settings.from_env()
    template = settings.s3_path_template
    if template is None:
        return
    from lora_plugins.resolvers.objects import object_source

    source = object_source(template, settings)
    engine.serve_from(lambda _: source, settings)


def register_hf_hub_resolver() -> None:
    """Entry point `lora_hf_hub_resolver`: serve adapters from the repositories of `VLLM_LORA_RESOLVER_HF_REPO_LIST`.

    Where `VLLM_PLUGINS` does not name it, vLLM's builtin of the same name runs as if we were not installed.

    Raises:
        InvalidSettings: the list, or a `LORA_PLUGINS_*` variable, cannot be right.
    """
    if not named_in_environment(HUB):
        engine.builtin(*_HUB_BUILTIN)()
        return
    settings = Settings.from_env()
    if not settings.hub_repos:
        return
    from lora_plugins.resolvers.hub import HubSource
    from lora_plugins.resolvers.hub_patterns import HubPatterns

    patterns = HubPatterns.parse(settings.hub_repos)
    engine.serve_from(
        lambda executor: HubSource(patterns, timeout_s=settings.fetch_timeout_s, executor=executor), settings
    )


def register_lru_manager() -> None:
    """Entry point `lora_lru_manager`: hold adapters in a host tier, staged beside the engine loop.

    Raises:
        InvalidSettings: a `LORA_PLUGINS_*` variable cannot be right.
    """
    if named_in_environment(MANAGER):
        from lora_plugins.manager.installation import install_manager

        Settings.from_env()  # a variable that cannot be right ends the start here, not in a worker
        install_manager()


def register_kernels() -> None:
    """Entry point `lora_kernels`: compute adapters with our kernels, chosen by `LORA_PLUGINS_KERNELS`.

    Raises:
        InvalidSettings: the kernels asked for cannot be had here, or a `LORA_PLUGINS_*` variable cannot be right.
    """
    if named_in_environment(KERNELS):
        engine.install_kernels(Settings.from_env())


if named_in_environment(FILESYSTEM):
    engine.take_over(*_FILESYSTEM_BUILTIN, register_filesystem_resolver)
if named_in_environment(HUB):
    engine.take_over(*_HUB_BUILTIN, register_hf_hub_resolver)
