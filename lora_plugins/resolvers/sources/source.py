"""What every source of adapters does; `tests/resolvers/sources/contract.py` tests each of them for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lora_plugins.absence import Absence
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import INDEX_FILE, PICKLE_FILES, WEIGHTS_FILE, is_shard
from lora_plugins.adapter.writers import by_files
from lora_plugins.errors import AdapterNotFound, SourceUnavailable
from lora_plugins.resolvers.sources.templates import LocalLink
from lora_plugins.store.layout import key_of
from lora_plugins.store.partial_download import PartialDownload

# The only files that are ever read or fetched, and those that the index names where weights are several files.
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, *PICKLE_FILES)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of an adapter at its source: `etag` is its identity there, `sha256` its digest where that is known."""

    name: str
    size_bytes: int
    etag: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """An adapter that a source has, before any of its bytes are fetched.

    Attributes:
        name: by which its source knows it.
        source: the label of the source.
        uri: where it lies, without credentials: `file:///adapters/sql`, `s3://bucket/sql`, `hf://org/repo/sql`.
        version: the identity of its bytes there: a commit, or a digest of names, sizes and ETags.
        files: those of `ADAPTER_FILES` that it has, and the several files of its weights.
        link: what is to be made a link to the fetched adapter, if anything.

    Raises:
        AdapterNotFound: it has no configuration.
    """

    name: AdapterName
    source: str
    uri: str
    version: str
    files: tuple[SourceFile, ...]
    link: LocalLink | None = None

    def __post_init__(self) -> None:
        """Refuse weights without a configuration."""
        if all(file.name != CONFIG_FILE for file in self.files):
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
    """Whether the weights of an adapter with these files are several more, which an index names."""
    return INDEX_FILE in names and WEIGHTS_FILE not in names


def choose_files(names: Iterable[str]) -> list[str]:
    """The files of an adapter among all those beside each other; without weights, another writer's file, to name it."""
    present = set(names)
    chosen = [name for name in ADAPTER_FILES if name in present]
    foreign = by_files(present) if chosen == [CONFIG_FILE] else None
    if foreign is not None:
        return [CONFIG_FILE, foreign[0]]
    return [*chosen, *(sorted(filter(is_shard, present)) if needs_shards(chosen) else ())]


def version_of(files: Iterable[SourceFile]) -> str:
    """A version for a source that has none: a digest of names, sizes and ETags."""
    return key_of(*(f"{file.name} {file.size_bytes} {file.etag}" for file in sorted(files, key=lambda file: file.name)))


class VersionChanged(SourceUnavailable):
    """The adapter changed at its source while it was being fetched; the caller locates it again and starts over."""

    is_of_one_request = True


@dataclass(frozen=True, slots=True)
class Listing:
    """The names that a source can list, and what it cannot, each with the reason."""

    names: tuple[str, ...]
    gaps: tuple[str, ...] = ()


class Source(Protocol):
    """A place adapters come from.

    `locate` answers an `Absence` only where the source itself says that it has no such adapter, or its settings leave
    the name out. It and `fetch` raise:
        InvalidAdapter, AdapterNotFound, IncompatibleAdapter: it has one of this name, but not one that can be served.
        SourceUnavailable: it does not answer, or the bytes cannot be had; `VersionChanged` where they have changed.
    """

    @property
    def label(self) -> str:
        """The source's name in logs and metrics, such as `filesystem`."""
        ...

    @property
    def remote(self) -> bool:
        """Whether asking costs a round trip, so that answers are worth remembering for a while."""
        ...

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        """Find the adapter without reading its weights; `base_model_name` is the served model's path or Hub id."""
        ...

    async def fetch(self, adapter: RemoteAdapter, download: PartialDownload) -> None:
        """Write the located version's files, all of them and no others, to `download.directory`."""
        ...


@runtime_checkable
class ListsNames(Protocol):
    """A source that lists its names too, for `lora-plugins ls --remote`."""

    async def names(self, base_model_name: str) -> Listing:
        """The names of the source's adapters, as far as the source knows them; requests never need the list."""
        ...
