"""The sources that the settings describe, by plugin and by URI; server and command line make the same sources.

A plugin's function returns None without the plugin's own setting. Callers check whether `VLLM_PLUGINS` has the plugin.
Sources start no threads before their first question, so any process can make them.

A URI is checked against `LORA_PLUGINS_ALLOWED_URIS` before any question, so that the answer to a forbidden URI shows
nothing of the place. A path in one of vLLM's own calls is not checked: callers of those may have vLLM read any path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidAdapter, InvalidSettings, SourceUnavailable
from lora_plugins.plugin_names import FILESYSTEM, HUB, OTHERS, S3
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.resolvers.sources.tree import ANYWHERE, MayLead, anywhere, is_neighbour
from lora_plugins.resolvers.sources.uri import BY_PATH, AllowedUris, SourceUri
from lora_plugins.settings import Settings, environment

ENTRY_POINTS = "lora_plugins.sources"


def filesystem_source(settings: Settings, may_lead: MayLead = anywhere) -> Source | None:
    """Adapters below `VLLM_LORA_RESOLVER_CACHE_DIR`; `may_lead` as of `FilesystemSource`.

    Raises:
        InvalidSettings: the path is no directory.
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
        root,
        may_lead=may_lead,
        link_roots=settings.link_roots,
        timeout_s=settings.fetch_timeout_s,
    )


def s3_source(settings: Settings) -> Source | None:
    """Adapters below `S3_PATH_TEMPLATE`.

    Raises:
        InvalidSettings: a malformed template or variable of the object store, or a missing package.
    """
    if settings.s3_path_template is None:
        return None
    from lora_plugins.resolvers.sources.object_store import object_source

    return object_source(settings.s3_path_template, settings)


def hub_source(settings: Settings) -> Source | None:
    """Adapters in the repositories of `VLLM_LORA_RESOLVER_HF_REPO_LIST`.

    Raises:
        InvalidSettings: a malformed entry of the list, or a server that takes repositories from ModelScope.
    """
    if not settings.hub_repos:
        return None
    if settings.use_modelscope:
        raise InvalidSettings(
            "VLLM_USE_MODELSCOPE=1 beside VLLM_LORA_RESOLVER_HF_REPO_LIST, repositories of the Hugging Face Hub",
            expected="adapters of ModelScope in a directory",
            remedy="run 'modelscope download --local_dir' into VLLM_LORA_RESOLVER_CACHE_DIR and unset "
            "VLLM_LORA_RESOLVER_HF_REPO_LIST, or unset VLLM_USE_MODELSCOPE",
        )
    from lora_plugins.resolvers.sources.hub import HubSource
    from lora_plugins.resolvers.sources.hub_repos import HubPatterns

    return HubSource(HubPatterns.parse(settings.hub_repos), timeout_s=settings.fetch_timeout_s)


def points_of_others() -> list[EntryPoint]:
    """The entry points of other packages' sources, in the order of their names."""
    return sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def sources_of_others(_: Settings) -> list[Source]:
    """Sources of other packages: calls each entry point of the group `lora_plugins.sources` with the environment.

    Raises:
        InvalidSettings: a source cannot be made.
    """
    found = []
    for point in points_of_others():
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


# By the name of the plugin that serves from the sources.
SOURCE_PLUGINS: Mapping[str, Callable[[Settings], list[Source]]] = {
    FILESYSTEM: _one(filesystem_source),
    S3: _one(s3_source),
    HUB: _one(hub_source),
    OTHERS: sources_of_others,
}


class UriSources:
    """The sources behind the allowed URIs, one for each scheme and bucket, host or directory.

    Raises:
        InvalidSettings: a malformed prefix in `LORA_PLUGINS_ALLOWED_URIS`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._allowed = AllowedUris.parse(settings.allowed_uris)
        self._sources: dict[tuple[str, str], Source] = {}

    def check(self, text: str) -> SourceUri:
        """Read an allowed URI.

        Raises:
            InvalidAdapter: the URI is malformed or not allowed.
        """
        return self._allowed.check(text)

    def of_repo(self, repo: str) -> SourceUri:
        """The URI of a repository that one of vLLM's own calls names.

        Raises:
            InvalidAdapter: the Hub can have no such repository, or vLLM takes repositories from ModelScope.
        """
        if self._settings.use_modelscope:
            raise InvalidAdapter(
                f"'{repo}', which is no directory here, with VLLM_USE_MODELSCOPE=1",
                expected="the path of a directory",
                remedy="run 'modelscope download --local_dir', and load that directory",
            )
        return SourceUri.of_repo(repo)

    def at(self, uri: SourceUri) -> tuple[Source, AdapterName]:
        """The source of a URI from `check`, and the name by which the source knows the adapter.

        Raises:
            SourceUnavailable: a package or setting for the source is missing.
        """
        below = [prefix for prefix in self._allowed.prefixes if uri.is_below(prefix)]
        try:
            if uri.scheme == "file":
                # The widest prefix, so that narrower prefixes share one source, its threads and limits.
                root = min(below, key=lambda prefix: len(prefix.segments))
                source = self._made(("file", root.path), lambda: self._directory(root.path))
                path = uri.segments[len(root.segments) :]
            elif uri.scheme == BY_PATH:
                # Callers of vLLM's own API may have vLLM read any path, wherever symlinks lead.
                source = self._made((BY_PATH, ""), lambda: self._directory("", is_by_path=True))
                path = uri.segments
            elif uri.scheme == "hf":
                # As for names: a moved repository is followed only where the operator named the repository.
                # An allowed prefix without a path (hf://org) names an owner, and no repository.
                # So is the repository of `of_repo`, which no prefix need allow.
                named = not below or any(prefix.segments for prefix in below)
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
        # Not parsed like a name: the URI's own grammar has checked the segments, and allows more characters.
        return source, AdapterName("/".join(path), uri.revision)

    def _made(self, key: tuple[str, str], make: Callable[[], Source]) -> Source:
        # Keep the source: its threads, connections and caches serve later URIs.
        if key not in self._sources:
            self._sources[key] = make()
        return self._sources[key]

    def _directory(self, root: str, *, is_by_path: bool = False) -> Source:
        return FilesystemSource(
            Path("/" + root),
            link_roots=[ANYWHERE] if is_by_path or ANYWHERE in self._settings.link_roots else [],
            # A policy is about names, and a path is no name: with a policy, a link leads only to its neighbours.
            may_lead=anywhere if is_by_path or self._settings.policy is None else is_neighbour,
            variable="LORA_PLUGINS_ALLOWED_URIS",
            timeout_s=self._settings.fetch_timeout_s,
        )

    def _hub(self, *, named: bool, pinned: bool) -> Source:
        from lora_plugins.resolvers.sources.hub import HubSource
        from lora_plugins.resolvers.sources.hub_repos import AnyRepo

        return HubSource(AnyRepo(explicit=named, is_pinned=pinned), timeout_s=self._settings.fetch_timeout_s)

    def _objects(self, uri: SourceUri) -> Source:
        from lora_plugins.resolvers.sources.object_store import object_source

        settings = replace(self._settings, local_path_template=None)  # the template is for names only
        return object_source(f"{uri.scheme}://{uri.authority}/{{lora_name}}", settings)
