"""The sources that the settings describe, by plugin and by URI; the command line makes the same ones as a server.

A plugin's function answers None where its own setting is not there. Whether `VLLM_PLUGINS` names the plugin, others
ask. Sources start no threads before they are asked something, so they can be made in any process.

A URI is checked against `LORA_PLUGINS_ALLOWED_URIS` before anything is asked, so that the answer to one that is not
allowed says nothing of what is there. A path that a call of vLLM's own names is not: whoever makes it reads any path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidSettings, SourceUnavailable
from lora_plugins.plugin_names import FILESYSTEM, HUB, OTHERS, S3
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.resolvers.sources.tree import MayLead, anywhere, is_neighbour
from lora_plugins.resolvers.sources.uri import BY_PATH, AllowedUris, SourceUri
from lora_plugins.settings import Settings, environment

ENTRY_POINTS = "lora_plugins.sources"


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
    from lora_plugins.resolvers.sources.object_store import object_source

    return object_source(settings.s3_path_template, settings)


def hub_source(settings: Settings) -> Source | None:
    """Adapters in the repositories of `VLLM_LORA_RESOLVER_HF_REPO_LIST`.

    Raises:
        InvalidSettings: an entry of the list cannot be right.
    """
    if not settings.hub_repos:
        return None
    from lora_plugins.resolvers.sources.hub import HubSource
    from lora_plugins.resolvers.sources.hub_repos import HubPatterns

    return HubSource(HubPatterns.parse(settings.hub_repos), timeout_s=settings.fetch_timeout_s)


def sources_of_others(_: Settings) -> list[Source]:
    """Those of other packages: each entry point of the group `lora_plugins.sources` is called with the environment.

    Raises:
        InvalidSettings: one cannot be made.
    """
    found = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            source = point.load()(environment())
        except InvalidSettings:
            raise
        except Exception as error:
            raise InvalidSettings(
                f"the source '{point.name}' ({point.value}), which raises {type(error).__name__}: {error}",
                expected="a source, or None where its own setting is not there",
                remedy=f"correct its settings, uninstall its package, or leave {OTHERS} out of VLLM_PLUGINS",
            ) from error
        if source is not None:
            found.append(source)
    return found


def _one(configured: Callable[[Settings], Source | None]) -> Callable[[Settings], list[Source]]:
    return lambda settings: [source for source in [configured(settings)] if source is not None]


# By the name of the plugin that serves from them.
SOURCE_PLUGINS: Mapping[str, Callable[[Settings], list[Source]]] = {
    FILESYSTEM: _one(filesystem_source),
    S3: _one(s3_source),
    HUB: _one(hub_source),
    OTHERS: sources_of_others,
}


class UriSources:
    """The sources behind the allowed URIs, one for each scheme and bucket, host or directory.

    Raises:
        InvalidSettings: a prefix of `LORA_PLUGINS_ALLOWED_URIS` that cannot be right.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._allowed = AllowedUris.parse(settings.allowed_uris)
        self._sources: dict[tuple[str, str], Source] = {}

    def check(self, text: str) -> SourceUri:
        """Read a URI that may be fetched.

        Raises:
            InvalidAdapter: it is malformed or not allowed.
        """
        return self._allowed.check(text)

    def at(self, uri: SourceUri) -> tuple[Source, AdapterName]:
        """The source of a URI that `check` has let through, and the name by which that source knows its adapter.

        Raises:
            SourceUnavailable: what it takes to ask it is not installed or configured here.
        """
        below = [prefix for prefix in self._allowed.prefixes if uri.is_below(prefix)]
        try:
            if uri.scheme == "file":
                root = min(below, key=lambda prefix: len(prefix.segments))
                source = self._made(("file", root.path), lambda: self._directory(root.path))
                path = uri.segments[len(root.segments) :]
            elif uri.scheme == BY_PATH:
                # Who may make vLLM's own calls may have it read any path, wherever its symlinks lead.
                source = self._made((BY_PATH, ""), lambda: self._directory("", is_by_path=True))
                path = uri.segments
            elif uri.scheme == "hf":
                # As with names: a repository that moved is followed only where the operator named it.
                named = any(prefix.segments for prefix in below)
                pinned = any(prefix.revision is not None for prefix in below)
                source = self._made(("hf", f"{named} {pinned}"), lambda: self._hub(named=named, pinned=pinned))
                path = (uri.authority, *uri.segments)
            else:
                source = self._made((uri.scheme, uri.authority), lambda: self._objects(uri))
                path = uri.segments
        except (InvalidSettings, ImportError) as error:
            found = error.found if isinstance(error, InvalidSettings) else f"no package for it ({error})"
            raise SourceUnavailable(
                f"a {uri.scheme}:// URI that this server cannot ask: {found}",
                expected=error.expected if isinstance(error, InvalidSettings) else "",
                remedy=error.remedy if isinstance(error, InvalidSettings) else "install the package named here",
            ) from error
        # Not parsed as a name is: the URI's own grammar has judged these segments, and allows more of them.
        return source, AdapterName("/".join(path), uri.revision)

    def _made(self, key: tuple[str, str], make: Callable[[], Source]) -> Source:
        if key not in self._sources:
            self._sources[key] = make()
        return self._sources[key]

    def _directory(self, root: str, *, is_by_path: bool = False) -> Source:
        return FilesystemSource(
            Path("/" + root),
            follow_symlinks=is_by_path or self._settings.follow_symlinks,
            # A policy is of names, and this path is none: where there is one, a link leads to its neighbours only.
            may_lead=anywhere if is_by_path or self._settings.policy is None else is_neighbour,
            variable="LORA_PLUGINS_ALLOWED_URIS",
            timeout_s=self._settings.fetch_timeout_s,
        )

    def _hub(self, *, named: bool, pinned: bool) -> Source:
        from lora_plugins.resolvers.sources.hub import HubSource
        from lora_plugins.resolvers.sources.hub_repos import AnyRepo

        return HubSource(
            AnyRepo(explicit=named, is_pinned=pinned),
            timeout_s=self._settings.fetch_timeout_s,
        )

    def _objects(self, uri: SourceUri) -> Source:
        from lora_plugins.resolvers.sources.object_store import object_source

        settings = replace(self._settings, local_path_template=None)  # that one is for names
        return object_source(f"{uri.scheme}://{uri.authority}/{{lora_name}}", settings)
