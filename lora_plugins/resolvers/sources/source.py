"""The interface of all sources of adapters, and what sources say: an adapter's files before any byte is fetched.

Implemented by `filesystem.py`, `object_store.py`, `hub.py`, `mixtures.py`, `pushed.py` and other packages;
`tests/resolvers/sources/contract.py` tests each source. Called on the event loop of an API server, a worker or the
command line: `search.py` calls `locate`, `versions.py` calls `fetch`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lora_plugins.absence import Absence
from lora_plugins.adapter.chat import CHAT_FILES, chat_files
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import INDEX_FILE, PICKLE_FILES, WEIGHTS_FILE, is_shard
from lora_plugins.adapter.writers import by_files
from lora_plugins.errors import AdapterNotFound, SourceUnavailable
from lora_plugins.resolvers.sources.templates import LocalLink
from lora_plugins.store.layout import key_of
from lora_plugins.store.partial_download import PartialDownload

# The only files that any source reads or fetches, besides the shards that an index names. `CHAT_FILES` are optional;
# alone, as with a base model, they are no adapter.
OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, *PICKLE_FILES)
ADAPTER_FILES = (*OWN_FILES, *CHAT_FILES)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of an adapter at its source: `etag` is the file's identity there, `sha256` its digest if known."""

    name: str
    size_bytes: int
    etag: str = ""
    sha256: str = ""

    def __post_init__(self) -> None:
        # A negative size would hide the size of another file in their sum.
        if self.size_bytes < 0:
            raise SourceUnavailable(
                f"a file of {self.size_bytes} bytes", expected="its size", remedy="check the source", file=self.name
            )


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """An adapter that a source has, before any of its bytes are fetched.

    Attributes:
        name: the name by which the source knows the adapter.
        source: the label of the source.
        uri: the place without credentials: `file:///adapters/sql`, `s3://bucket/sql`, `hf://org/repo/sql`.
        version: the identity of the bytes at the source: a commit, or a digest of names, sizes and ETags.
        files: the adapter's files among `ADAPTER_FILES`, and its shards.
        link: a path that becomes a link to the fetched adapter, of `LOCAL_PATH_TEMPLATE`; None without the setting.
        is_rest: whether `files` are only the files that are left to fetch, after the configuration.
        warnings: what clients should know of the adapter, beside what its files show.

    Raises:
        AdapterNotFound: the adapter has no configuration.
    """

    name: AdapterName
    source: str
    uri: str
    version: str
    files: tuple[SourceFile, ...]
    link: LocalLink | None = None
    is_rest: bool = False
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse weights without a configuration."""
        if not self.is_rest and all(file.name != CONFIG_FILE for file in self.files):
            raise AdapterNotFound(
                "weights without a configuration",
                expected="this file beside them",
                remedy="copy it there too, or save the adapter again with PEFT",
                file=CONFIG_FILE,
            )

    @property
    def promised(self) -> Sequence[tuple[str, int, str]]:
        """Name, size in bytes and SHA-256 (or empty) of every file."""
        return [(file.name, file.size_bytes, file.sha256) for file in self.files]


def needs_shards(names: Collection[str]) -> bool:
    """Whether an adapter with these files has its weights in shards, which an index names."""
    return INDEX_FILE in names and WEIGHTS_FILE not in names


def choose_files(names: Iterable[str]) -> list[str]:
    """The adapter's files among the names of a folder; without weights, a file of another writer, for the error."""
    present = set(names)
    chosen = [name for name in OWN_FILES if name in present]
    foreign = by_files(present) if chosen == [CONFIG_FILE] else None
    if foreign is not None:
        return [CONFIG_FILE, foreign[0]]
    shards = sorted(filter(is_shard, present)) if needs_shards(chosen) else ()
    return [*chosen, *shards, *(chat_files(present) if chosen else ())]


def place_in_order(source: Source, order: Sequence[str]) -> int:
    """Where `LORA_PLUGINS_SOURCES` puts a source; sources that the setting leaves out come last."""
    # The setting's name of a source, where the source's label says more.
    name = getattr(source, "setting", source.label)
    return order.index(name) if name in order else len(order)


def version_of(files: Iterable[SourceFile]) -> str:
    """A version for a source without versions: a digest of names, sizes and ETags."""
    return key_of(*(f"{file.name} {file.size_bytes} {file.etag}" for file in sorted(files, key=lambda file: file.name)))


class VersionChanged(SourceUnavailable):
    """The adapter changed at its source during the fetch; the caller locates the adapter again and starts over."""

    is_of_one_request = True


@dataclass(frozen=True, slots=True)
class Listing:
    """The names that a source can list, and the gaps in the list, with reasons."""

    names: tuple[str, ...]
    gaps: tuple[str, ...] = ()


class Source(Protocol):
    """A place with adapters.

    `locate` returns an `Absence` only where the source itself answers that the adapter is absent, or the source's
    settings exclude the name. `locate` and `fetch` raise:
        InvalidAdapter, AdapterNotFound, IncompatibleAdapter: the source has the name, but no adapter to serve.
        SourceUnavailable: the source does not answer, or the bytes cannot be had; `VersionChanged` for changed bytes.
    """

    @property
    def label(self) -> str:
        """The source's name in logs and metrics, such as `filesystem`."""

    @property
    def remote(self) -> bool:
        """Whether a question costs a round trip, so that answers are worth remembering for a while."""

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        """Find the adapter without reading its weights; `base_model_name` is the served model's path or Hub id."""

    async def fetch(self, adapter: RemoteAdapter, download: PartialDownload) -> None:
        """Write `adapter.files` of the located version to `download.directory`.

        Called twice, first for the configuration: an adapter that its configuration condemns is fetched no further.
        Not called again where all files are there.
        """


@runtime_checkable
class ListsNames(Protocol):
    """A source that can list its names, for `lora-plugins ls --remote`."""

    async def names(self, base_model_name: str) -> Listing:
        """The names of the source's adapters, as far as the source knows them; requests never need the list."""


@runtime_checkable
class HasProbes(Protocol):
    """A source whose parts may fail one by one, such as repositories of several owners, for the doctor."""

    def probes(self, name: str) -> Sequence[AdapterName]:
        """A name for each part, `name` where any will do."""
