"""Sources for URIs, made at their first use: `file://`, `hf://`, and whatever `objects.py` has a file system for.

A URI is read and held against `LORA_PLUGINS_ALLOWED_URIS` before anything is asked, so that the answer to one that is
not allowed says nothing of what is there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidSettings, SourceUnavailable
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.hub.patterns import HubPatterns
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source
from lora_plugins.resolvers.uris import AllowedUris, SourceUri
from lora_plugins.settings import Settings
from lora_plugins.store.store import PartialDownload

if TYPE_CHECKING:
    from lora_plugins.resolvers.sources.hub.source import HubSource


@dataclass(frozen=True, slots=True)
class AtUri:
    """A source that knows one adapter, whatever name it is asked for."""

    _source: Source
    _find: Callable[[AdapterName, str], Awaitable[RemoteAdapter | None]]

    def __str__(self) -> str:
        return str(self._source)

    @property
    def label(self) -> str:
        """The label of the source behind it."""
        return self._source.label

    @property
    def remote(self) -> bool:
        """As the source behind it."""
        return self._source.remote

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | None:
        """Find the adapter at the URI; see `Source` for what is raised."""
        return await self._find(name, base_model_name)

    async def fetch(self, located: RemoteAdapter, arriving: PartialDownload) -> None:
        """As the source behind it."""
        await self._source.fetch(located, arriving)

    async def published(self, located: RemoteAdapter, directory: Path) -> None:
        """As the source behind it."""
        await self._source.published(located, directory)


class UriSources:
    """The sources behind the allowed URIs, one for each scheme and bucket, host or directory.

    Raises:
        InvalidSettings: a prefix of `LORA_PLUGINS_ALLOWED_URIS` that cannot be right.
    """

    def __init__(self, settings: Settings, executor: Executor | None) -> None:
        self._settings = settings
        self._executor = executor
        self._allowed = AllowedUris.parse(settings.allowed_uris)
        self._sources: dict[tuple[str, str], Source] = {}
        self._hub: HubSource | None = None

    def check(self, text: str) -> SourceUri:
        """Read a URI that may be fetched.

        Raises:
            InvalidAdapter: it is malformed or not allowed.
        """
        return self._allowed.check(text)

    def at(self, uri: SourceUri) -> AtUri:
        """The source of a URI that `check` has let through.

        Raises:
            SourceUnavailable: what it takes to ask it is not installed or configured here.
        """
        below = [prefix for prefix in self._allowed.prefixes if uri.is_below(prefix)]
        try:
            if uri.scheme == "file":
                return self._directory(uri, min(below, key=lambda prefix: len(prefix.segments)))
            if uri.scheme == "hf":
                # As with names: a repository that moved is followed only where the operator named it.
                return self._repository(uri, named=any(prefix.segments for prefix in below))
            return self._objects(uri)
        except (InvalidSettings, ImportError) as error:
            found = error.found if isinstance(error, InvalidSettings) else f"no package for it ({error})"
            raise SourceUnavailable(
                f"a {uri.scheme}:// URI that this server cannot ask: {found}",
                expected=error.expected if isinstance(error, InvalidSettings) else "",
                remedy=error.remedy if isinstance(error, InvalidSettings) else "install lora-plugins[s3,hub]",
            ) from error

    def _directory(self, uri: SourceUri, root: SourceUri) -> AtUri:
        key = ("file", root.path)
        if key not in self._sources:
            self._sources[key] = FilesystemSource(
                Path("/" + root.path),
                follow_symlinks=self._settings.follow_symlinks,
                executor=self._executor,
                variable="LORA_PLUGINS_ALLOWED_URIS",
            )
        return self._below(key, uri.segments[len(root.segments) :])

    def _objects(self, uri: SourceUri) -> AtUri:
        from lora_plugins.resolvers.sources.object_store.source import object_source

        key = (uri.scheme, uri.authority)
        if key not in self._sources:
            template = f"{uri.scheme}://{uri.authority}/{{lora_name}}"
            settings = replace(self._settings, local_path_template=None)  # that one is for names
            self._sources[key] = object_source(template, settings)
        return self._below(key, uri.segments)

    def _below(self, key: tuple[str, str], segments: tuple[str, ...]) -> AtUri:
        # Not parsed as a name is: the URI's own grammar has judged these segments, and allows more of them.
        path = AdapterName("/".join(segments))
        source = self._sources[key]
        return AtUri(source, lambda _, base_model_name: source.locate(path, base_model_name))

    def _repository(self, uri: SourceUri, *, named: bool) -> AtUri:
        from lora_plugins.resolvers.sources.hub.source import HubSource

        hub = self._hub
        if hub is None:
            hub = HubSource(HubPatterns(()), timeout_s=self._settings.fetch_timeout_s, executor=self._executor)
            self._hub = hub
        return AtUri(hub, lambda name, _: hub.locate_uri(uri, name, explicit=named))
