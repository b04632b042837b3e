"""The sources that the settings describe: by plugin for names, and by URI.

Runs at the start of any process that may ask a source, and at the first use of a URI; server and command line make the
same sources. Callers check whether `VLLM_PLUGINS` has the plugin. Sources start no threads before their first question.

A URI is checked against `LORA_PLUGINS_ALLOWED_URIS` before any question, so that the answer to a forbidden URI shows
nothing of the place. A path in one of vLLM's own calls is not checked: callers of those may have vLLM read any path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidAdapter, InvalidSettings, SourceUnavailable
from lora_plugins.plugin_names import OTHERS, SOURCES
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.resolvers.sources.tree import ANYWHERE, MayLead, anywhere, is_neighbour
from lora_plugins.resolvers.sources.uri import BY_PATH, AllowedUris, SourceUri
from lora_plugins.settings import Settings, environment

ENTRY_POINTS = "lora_plugins.sources"


def points_of_others() -> list[EntryPoint]:
    """The entry points of other packages' sources, in the order of their names."""
    return sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def sources_of(plugin: str, settings: Settings, may_lead: MayLead = anywhere) -> list[Source]:
    """The sources from which a plugin serves; none without the plugin's own setting.

    Raises:
        InvalidSettings: a source cannot be made.
    """
    if plugin == OTHERS:
        return _sources_of_others()
    kind = next(kind for kind in SOURCES if kind.plugin == plugin)
    if not getattr(settings, kind.setting):
        return []
    # Imported late: libraries of a source that is not asked need not be there.
    module = import_module(f"lora_plugins.resolvers.sources.{kind.module}")
    return [module.configured(settings, may_lead)]


def _sources_of_others() -> list[Source]:
    """Sources of other packages: calls each entry point of the group `lora_plugins.sources` with the environment."""
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


class UriSources:
    """The sources behind the allowed URIs, one for each scheme and bucket, host or directory.

    Attributes:
        allowed: the prefixes of `LORA_PLUGINS_ALLOWED_URIS`.

    Raises:
        InvalidSettings: a malformed prefix in `LORA_PLUGINS_ALLOWED_URIS`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.allowed = AllowedUris.parse(settings.allowed_uris)
        # By scheme, and what else distinguishes the sources of a scheme.
        self._sources: dict[tuple[str, str], Source] = {}

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
        """The source of a URI that `allowed` has checked, and the name by which the source knows the adapter.

        Raises:
            SourceUnavailable: a package or setting for the source is missing.
        """
        below = [prefix for prefix in self.allowed.prefixes if uri.is_below(prefix)]
        path = uri.segments
        try:
            if uri.scheme == "file":
                # The widest prefix, so that narrower prefixes share one source, its threads and limits.
                root = min(below, key=lambda prefix: len(prefix.segments))
                source = self._made(("file", root.path), lambda: self._directory(root.path))
                path = uri.segments[len(root.segments) :]
            elif uri.scheme == BY_PATH:
                # Callers of vLLM's own API may have vLLM read any path, wherever symlinks lead.
                source = self._made((BY_PATH, ""), lambda: self._directory("", is_by_path=True))
            elif uri.scheme == "hf":
                # As for names: a moved repository is followed only where somebody has named the repository. An allowed
                # prefix without a path (hf://org) names an owner alone; vLLM's own call names the one of `of_repo`.
                named = not below or any(prefix.segments for prefix in below)
                pinned = any(prefix.revision is not None for prefix in below)
                source = self._made(("hf", f"{named} {pinned}"), lambda: self._hub(named=named, pinned=pinned))
                path = (uri.authority, *uri.segments)
            else:
                source = self._made((uri.scheme, uri.authority), lambda: self._objects(uri))
        except InvalidSettings as error:
            raise SourceUnavailable(
                f"a {uri.scheme}:// URI that this server cannot ask: {error.found}",
                expected=error.expected,
                remedy=error.remedy,
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
