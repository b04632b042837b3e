"""The sources that the settings describe, each made as a server makes it; the command line makes the same ones.

Each function answers None where its own setting is not there. Whether `VLLM_PLUGINS` names the plugin, others ask.
Sources start no threads before they are asked something, so they can be made in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lora_plugins.errors import InvalidSettings
from lora_plugins.plugin_names import FILESYSTEM, HUB, S3
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.resolvers.sources.tree import MayLead, anywhere
from lora_plugins.settings import Settings


def filesystem_source(settings: Settings, may_lead: MayLead = anywhere) -> Source | None:
    """Adapters below `VLLM_LORA_RESOLVER_CACHE_DIR`; `may_lead` as of `FilesystemSource`.

    Raises:
        InvalidSettings: it is no directory.
    """
    root = settings.filesystem_root
    if root is None:
        return None
    if not root.is_dir():
        raise InvalidSettings(
            f"VLLM_LORA_RESOLVER_CACHE_DIR={str(root)!r}, which is no directory",
            expected="a directory of adapters",
            remedy="create it or correct the variable",
        )
    return FilesystemSource(
        root, follow_symlinks=settings.follow_symlinks, may_lead=may_lead, timeout_s=settings.fetch_timeout_s
    )


def s3_source(settings: Settings) -> Source | None:
    """Adapters below `S3_PATH_TEMPLATE`.

    Raises:
        InvalidSettings: the template or a variable of the object store cannot be right, or a package is missing.
    """
    if settings.s3_path_template is None:
        return None
    from lora_plugins.resolvers.sources.object_store.source import object_source

    return object_source(settings.s3_path_template, settings)


def hub_source(settings: Settings) -> Source | None:
    """Adapters in the repositories of `VLLM_LORA_RESOLVER_HF_REPO_LIST`.

    Raises:
        InvalidSettings: an entry of the list cannot be right.
    """
    if not settings.hub_repos:
        return None
    from lora_plugins.resolvers.sources.hub.patterns import HubPatterns
    from lora_plugins.resolvers.sources.hub.source import HubSource

    return HubSource(
        HubPatterns.parse(settings.hub_repos), timeout_s=settings.fetch_timeout_s, bytes_per_s=settings.fetch_rate_bytes
    )


# By the name of the plugin that serves from it.
SOURCE_PLUGINS: Mapping[str, Callable[[Settings], Source | None]] = {
    FILESYSTEM: filesystem_source,
    S3: s3_source,
    HUB: hub_source,
}
