"""The functions behind our entry points, and nothing else; vLLM calls them in every one of its processes."""

from __future__ import annotations

from lora_plugins import engine
from lora_plugins.errors import InvalidSettings
from lora_plugins.resolvers.filesystem import FilesystemSource
from lora_plugins.settings import Settings, named_in_environment

FILESYSTEM = "lora_filesystem_resolver"

_FILESYSTEM_BUILTIN = ("vllm.plugins.lora_resolvers.filesystem_resolver", "register_filesystem_resolver")


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


if named_in_environment(FILESYSTEM):
    engine.take_over(*_FILESYSTEM_BUILTIN, register_filesystem_resolver)
