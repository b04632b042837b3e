"""What adapter names mean to this process: the last version of each name, and the versions that a name may reach.

Runs on the event loop of an API server (or of a worker that lacks an adapter's files), in memory only. `versions.py`
notes each version that it has brought into the store; `resolver.py` asks before it asks a source: a remembered version
or a remembered fault needs no question. The leases of the versions are in the store.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cachetools import LRUCache, TTLCache

from lora_plugins.adapter.mixture import terms_of
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable, is_remembered
from lora_plugins.plugin_names import SOURCES
from lora_plugins.resolvers.sources.pushed import LABEL as PUSHED
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source
from lora_plugins.settings import Settings
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.store import Store

_REMEMBERED_NAMES = 10_000
_REMEMBERED_REJECTIONS = 1_000
_REMEMBERED_WARNINGS = 100_000
_LOCATED_S = 5.0  # seconds that a located adapter waits for its caller to have the files fetched
# Seconds for which a directory of the store counts as present. A look releases the interpreter's lock to other threads,
# and beside a flood of look-ups costs a hot name a hundred times the answer's own time.
_SEEN_S = 1.0
# Labels by scheme, for versions that only the store remembers; an object store's label is its scheme.
_LABELS = {kind.scheme: kind.label for kind in SOURCES}

# An adapter's name, and the requested URI, or "" for a request by name.
Key = tuple[str, str]
AtSource = tuple[Source, RemoteAdapter]


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """A verified adapter under the requested name; `path` is absolute, immutable and leased.

    Attributes:
        adapter_id: of the name, see `adapter_id()`.
        path: of the directory in the store.
        source: label of the source.
        uri: the adapter's place there, without credentials.
        version: at the source: a commit, or a digest of names, sizes and ETags.
        size_bytes: of configuration and weights.
        rank: the largest of any module.
        is_3d: whether the weights have stacked experts, which vLLM's requests must state (`is_3d_lora_weight`).
        warnings: warnings for answers of the adapter, see `VerifiedAdapter`.
        holder: the holder of the lease; None for the name.
        chat_files: names of the files for chats in the directory.
    """

    name: str
    adapter_id: int
    path: Path
    source: str
    version: str
    uri: str
    size_bytes: int
    rank: int
    is_3d: bool = False
    warnings: tuple[str, ...] = ()
    holder: Hashable = None
    chat_files: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 over the files' names, sizes and contents, in hexadecimal; the last part of `path`."""
        return self.path.name

    @property
    def parts(self) -> dict[str, str]:
        """Of a mixture, the digests of its parts by their names; empty for other adapters."""
        digests = (term.partition("*")[0] for term in self.version.split("+"))
        return {term.name: digest for term, digest in zip(terms_of(self.name) or (), digests, strict=False)}


@dataclass(slots=True)
class _Last:
    """The last version of a key.

    Attributes:
        believed_until: when the source must be asked again, in seconds of the timer.
        seen_until: when the store must be looked at again, in seconds of the timer.
    """

    version: ResolvedAdapter
    believed_until: float
    seen_until: float = float("-inf")


class KnownVersions:
    """What names mean to one process, in bounded memory. For one event loop.

    Attributes:
        refused: errors of versions with bytes that cannot be served, by URI and version at the source.
        located: adapters that `has` found a moment ago and nobody has fetched yet: `resolve` asks no source again.
        sizes_bytes: of configuration and weights, by digest.
    """

    def __init__(self, settings: Settings, store: Store, timer: Callable[[], float] = time.monotonic) -> None:
        self._store, self._timer, self._revalidate_s = store, timer, settings.revalidate_s
        self.refused: LRUCache[tuple[str, str], LoRAPluginsError] = LRUCache(_REMEMBERED_REJECTIONS)
        self._last: LRUCache[Key, _Last] = LRUCache(_REMEMBERED_NAMES)
        # vLLM handles requests for one name one after the other, and each would meet the fault again.
        faults_s = SourceUnavailable.retry_after_s
        self._faults: TTLCache[Key, LoRAPluginsError] = TTLCache(_REMEMBERED_NAMES, faults_s, timer)
        self.located: TTLCache[Key, AtSource] = TTLCache(_REMEMBERED_NAMES, _LOCATED_S, timer)
        # Name → the places of the name, with the source's label, by which a name may reach a version.
        self._places: LRUCache[str, dict[str, str]] = LRUCache(_REMEMBERED_NAMES)
        # (name, digest) → the last (URI, version) with these bytes for the name: a manifest knows only the first fetch.
        self._had: LRUCache[tuple[str, str], tuple[str, str]] = LRUCache(_REMEMBERED_NAMES)
        self.sizes_bytes: LRUCache[str, int] = LRUCache(_REMEMBERED_NAMES)
        self._warnings: LRUCache[str, tuple[str, ...]] = LRUCache(_REMEMBERED_WARNINGS)

    def last(self, name: str, asked_uri: str = "") -> ResolvedAdapter | None:
        """The last version resolved for a name, or for a name by a URI; the store may have lost the version since."""
        last = self._last.get((name, asked_uri))
        return None if last is None else last.version

    def believed(self, key: Key) -> ResolvedAdapter | None:
        """The version that a remote source had within the last `revalidate_s`; None where a source must be asked.

        The version is leased and, a second ago at most, was in the store.

        Raises:
            LoRAPluginsError: a remembered fault.
        """
        last, now = self._last.get(key), self._timer()
        if last is not None and now < last.believed_until and self.is_held(last.version):
            # The disk is looked at once a second at most: requests of a served name come here, each.
            if now < last.seen_until:
                return last.version
            if self._store.has(last.version.path):
                last.seen_until = now + _SEEN_S
                return last.version
        if (fault := self._faults.get(key)) is not None:
            raise copy.copy(fault)  # a copy: raising one object again and again grows its traceback
        return None

    def is_held(self, version: ResolvedAdapter) -> bool:
        """Whether a version is still leased for its name or holder; takes a microsecond."""
        return self._store.leases.is_held(version.digest, version.holder or version.name)

    def note(self, key: Key, version: ResolvedAdapter, *, is_remote: bool = False) -> ResolvedAdapter:
        """Remember and return a key's version; for `revalidate_s`, a remote source need not confirm the version."""
        name = key[0]
        believed_until = self._timer() + self._revalidate_s if is_remote else float("-inf")
        self._last[key] = _Last(version, believed_until)
        self._places.setdefault(name, {})[version.uri] = version.source
        self.note_had(name, version)
        self._faults.pop(key, None)  # a success ends the remembered fault of the same question
        self.located.pop(key, None)
        return version

    def note_had(self, name: str, version: ResolvedAdapter) -> None:
        """Remember that a name has had a version, perhaps from a place that is not the name's."""
        self._places.setdefault(name, {})
        self._had[name, version.digest] = version.uri, version.version
        self.sizes_bytes[version.digest] = version.size_bytes

    def disbelieve(self, key: Key) -> None:
        """Have the sources asked at the next request."""
        if (last := self._last.get(key)) is not None:
            last.believed_until = float("-inf")

    def note_fault(self, key: Key, error: LoRAPluginsError) -> None:
        """Have `believed` raise a fault, for the fault's Retry-After; other errors are not remembered."""
        if is_remembered(error):
            self._faults[key] = error

    def reach_of(self, name: str) -> Callable[[Manifest], bool] | None:
        """A function, for any thread: whether a name may reach a stored version. None for a name never found.

        A name reaches the versions of its own places, and versions with bytes that came for the name.
        """
        places = self._places.get(name)
        if places is None:
            return None
        own = {*places, f"{PUSHED}://{name}"}
        return lambda manifest: manifest.uri in own or (name, manifest.digest) in self._had

    def origin(self, name: str, manifest: Manifest) -> tuple[str, str, str]:
        """Source label, URI and version of a stored version: as the name had these bytes, or else as the first had."""
        uri, version = self._had.get((name, manifest.digest), (manifest.uri, manifest.version))
        label = self._places.get(name, {}).get(uri)
        return label or _LABELS.get(scheme := uri.partition("://")[0], scheme), uri, version

    def warnings_of(self, digest: str) -> tuple[str, ...]:
        """Warnings for answers of a version; none for a version not resolved in this process."""
        return self._warnings.get(digest, ())

    def note_warnings(self, digest: str, warnings: Iterable[str]) -> None:
        """Note warnings of a version that this process, or another API server, has verified."""
        if found := tuple(warnings):
            self._warnings[digest] = found
