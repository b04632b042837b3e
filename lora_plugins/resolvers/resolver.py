"""Resolve a name or URI to a verified adapter in the store: ask the sources in order; the first answer counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lora_plugins.absence import Absence
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import (
    AdapterNotFound,
    InvalidAdapter,
    LoRAPluginsError,
    SourceUnavailable,
    describing,
)
from lora_plugins.events import (
    AbsenceRemembered,
    AdapterConfirmed,
    AdapterDenied,
    AdapterRejected,
    AdapterUnknown,
    Events,
    LookUpRefused,
    SourceFailed,
    StoreDamaged,
    StoreEvicted,
)
from lora_plugins.resolvers.known_versions import AtSource, Key, KnownVersions, ResolvedAdapter
from lora_plugins.resolvers.look_ups import LookUpLimits, LookUps, LookUpsBusy
from lora_plugins.resolvers.single_flight import SingleFlight
from lora_plugins.resolvers.sources.configured import UriSources
from lora_plugins.resolvers.sources.errors import FailureKind, RemoteFailure
from lora_plugins.resolvers.sources.pushed import PushedAdapter, PushSource
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source, VersionChanged
from lora_plugins.resolvers.sources.uri import BY_PATH, SourceUri, is_from, is_path
from lora_plugins.resolvers.versions import VersionStore
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.store import Store

_VERSION_CHANGES = 3
# Of each source, a directory too: threads look there, and many of them hold up the event loop.
_LIMITS = LookUpLimits()
# Answers of a working source about one adapter: no outage that should alarm an operator.
_OF_ONE_ADAPTER = frozenset({FailureKind.HIDDEN, FailureKind.GATED})


@dataclass(frozen=True, slots=True)
class _Query:
    """A question: a name at its sources or at a URI; `force_refresh` ignores remembered answers.

    `holder` gets the lease; None for the name.
    """

    name: AdapterName
    uri: SourceUri | None = None
    force_refresh: bool = False
    holder: Hashable = None

    @property
    def key(self) -> Key:
        return str(self.name), "" if self.uri is None else str(self.uri)

    @property
    def is_by_path(self) -> bool:
        return self.uri is not None and self.uri.scheme == BY_PATH


class AdapterResolver:
    """Answers names and URIs with verified adapters in the store, from one server's sources in their order.

    The first source that has the name decides. An unavailable source does not hide later sources; if no later source
    has the name either, the error is raised, because "no such adapter" would be a guess.

    `known` keeps answers of remote sources, refused versions, and faults for their Retry-After: vLLM handles requests
    for one name one after the other, and each would meet the fault again. Concurrent requests for one name share one
    answer. A name by URI shares only the store with the same name by its sources.

    A returned version is leased until every name that has got the version is released.

    Attributes:
        known: what names mean to this process.
        base: the served model, set once the server is made.
        on_abandoned: called with a leased version whose callers were all cancelled before the answer.
        principal: the origin of the running request; look-ups of new names and fetches take turns by principal.
        describe_model: asks the engine for its model's modules, once; the answer is None where LoRA is off.

    Raises:
        InvalidSettings: a malformed prefix in `LORA_PLUGINS_ALLOWED_URIS`.
    """

    def __init__(self, settings: Settings, events: Events, store: Store, sources: Sequence[Source] = ()) -> None:
        self.settings, self.events, self.store = settings, events, store
        store.on_evict = lambda digest, size_bytes: events.emit(StoreEvicted(digest, size_bytes))
        store.on_damage = lambda digest: events.emit(StoreDamaged(digest))
        self.sources = list(sources)
        self.base: BaseModel | None = None
        self.principal: Callable[[], Hashable] = lambda: None
        self.describe_model: Callable[[], Awaitable[Model | None]] | None = None
        self._describing = asyncio.Lock()
        self._by_uri, self._push_source = UriSources(settings), PushSource()
        self.known = KnownVersions(settings, store)
        self._versions = VersionStore(settings, events, store, self.known)
        self._flights: SingleFlight[Hashable, ResolvedAdapter | None] = SingleFlight(self._nobody_waits)
        self._finding: SingleFlight[Key, bool] = SingleFlight()
        self.on_abandoned: Callable[[ResolvedAdapter], None] = lambda _: None
        self._look_ups: dict[int, LookUps] = {}

    def add(self, source: Source) -> None:
        """Ask this source too, in the order of the settings; a second source with the same label changes nothing."""
        if any(known.label == source.label for known in self.sources):
            return
        order = self.settings.sources
        self.sources.append(source)
        # Sources outside the setting come last, in the order in which plugins add them.
        self.sources.sort(key=lambda item: order.index(item.label) if item.label in order else len(order))

    async def resolve(self, text: str, base_path: str) -> ResolvedAdapter | None:
        """Find, fetch and verify the adapter called `text`; None where every source answers that the adapter is absent.

        `base_path` is the served model's path or Hub id, the stand-in for the base model until `self.base` is set.

        Raises:
            LoRAPluginsError: the adapter cannot be served, or a source is unavailable.
        """
        try:
            name = AdapterName.parse(text)
        except AdapterNotFound as error:
            self.events.emit(AdapterUnknown(text, error.found))
            return None
        return await self._answer(_Query(name), base_path)

    async def has(self, text: str, base_path: str) -> bool:
        """Whether a source has the adapter called `text`; fetches nothing, and `resolve` need not ask again.

        Raises:
            LoRAPluginsError: a source is unavailable, or has no valid adapter there.
        """
        try:
            query = _Query(AdapterName.parse(text))
        except AdapterNotFound:
            return False
        if self.known.believed(query.key) is not None:
            return True
        with self.known.noting_fault(query.key):
            return await self._finding.run(query.key, lambda: self._find(query, base_path))

    async def resolve_uri(self, name: str, uri: str, base_path: str) -> ResolvedAdapter:
        """Fetch and verify the adapter at `uri`, to be served as `name`.

        Raises:
            InvalidAdapter: the name or URI is malformed, or the URI not allowed; no source was asked.
            AdapterNotFound: the URI has no adapter.
            LoRAPluginsError: the adapter cannot be served, or the source is unavailable.
        """
        resolved = await self._answer(self._query(name, uri), base_path)
        if resolved is None:
            raise AdapterNotFound(
                "no adapter at this URI",
                expected="a directory with adapter_config.json and its weights",
                remedy="correct the URI, or put the adapter there",
                adapter=name,
            )
        return resolved

    async def snapshot(self, name: str, path: str, base_path: str, holder: Hashable = None) -> ResolvedAdapter | None:
        """The adapter in a directory as of now, copied and verified, for one of vLLM's own calls with a path.

        The path needs no allowed prefix, and `name` may be any text. None where the directory has no adapter. The lease
        is of `holder`, if given.

        Raises:
            LoRAPluginsError: the adapter cannot be served, or the file system does not answer.
        """
        # No path can have a zero byte, and os calls would raise ValueError.
        if "\0" in path:
            return None
        query = _Query(AdapterName(name), SourceUri.of_path(path), force_refresh=True, holder=holder)
        # Not shared with earlier callers: the files may have changed since.
        return await self._flights.run((query, object()), lambda: self._resolve(query, base_path))

    async def pushed(self, adapter: PushedAdapter, base_path: str) -> ResolvedAdapter:
        """A pushed adapter, verified and leased for its name.

        Raises:
            LoRAPluginsError: the adapter cannot be served.
        """
        return await self._serve(_Query(adapter.name), self._push_source, adapter, base_path)

    async def latest(self, name: str, uri: str | None, base_path: str) -> ResolvedAdapter | None:
        """The newest version of an adapter that `resolve` (or, with `uri`, `resolve_uri`) once returned.

        `uri` may also be the path of a `snapshot`.

        The source is asked even just after its last answer, and a version that the store lacks is fetched and verified.
        None where no source has the adapter any more. An earlier version in use stays leased.

        Raises:
            LoRAPluginsError: the newest version cannot be served, or the source is unavailable. A later source never
                replaces the source that the adapter last came from.
        """
        if is_path(uri):
            return await self.snapshot(name, uri, base_path)
        try:
            newest = replace(self._query(name, uri), force_refresh=True)
        except AdapterNotFound:
            return None
        return await self._flights.run(newest, lambda: self._resolve(newest, base_path))

    async def of_digest(self, name: str, digest_prefix: str, *, of_any_name: bool = False) -> ResolvedAdapter | None:
        """A version that the store still has, verified and leased for `name`; no source is asked.

        Only versions from places where this process has found `name` count, so that a name cannot reach other names'
        versions; with `of_any_name`, for a caller that knows all 64 characters of the digest, all versions count. None
        where no version or more than one matches, or the prefix is shorter than 8 characters.

        Raises:
            LoRAPluginsError: the version does not fit the served model.
        """
        with describing(adapter=name):
            base = await self._described_base()
            return await self._versions.of_digest(
                name, digest_prefix, base, of_any_name=of_any_name, principal=self.principal()
            )

    async def restored(self, name: str, uri: str | None, digest: str, place: str) -> ResolvedAdapter | None:
        """The version that the server before this one served, verified and leased for `name`; no source is asked.

        Its source counts as the place where this server found the name last. None where the store no longer has the
        version, or no source of this server has the description `place`, of `place_of`.

        Raises:
            LoRAPluginsError: the version does not fit the served model, or its URI is no longer allowed.
        """
        query = self._query(name, uri)
        label = next((source.label for source in self.sources if str(source) == place), None)
        # Another template or root now: the name may mean another adapter there.
        if uri is None and label is None:
            return None
        found = await self.of_digest(name, digest, of_any_name=True)
        if found is None:
            return None
        if uri is not None and not is_from(found.uri, uri):
            self.store.release(name, found.path)
            return None
        # A source of another package has a scheme of its own, by which no label is known.
        return self.known.note(query.key, found if label is None or uri is not None else replace(found, source=label))

    def place_of(self, version: ResolvedAdapter) -> str:
        """The place where a version's source looks for names: root, template or repositories, without credentials."""
        return next((str(source) for source in self.sources if source.label == version.source), "")

    def _query(self, name: str, uri: str | None) -> _Query:
        if uri is None:
            return _Query(AdapterName.parse(name))
        with describing(adapter=name):
            checked = self._by_uri.check(uri)
            try:
                return _Query(AdapterName.parse(name), checked)
            except AdapterNotFound as error:
                raise InvalidAdapter(error.found, expected=error.expected, remedy="choose another name") from None

    async def _answer(self, query: _Query, base_path: str) -> ResolvedAdapter | None:
        if (fresh := self.known.believed(query.key)) is not None:
            self.events.emit(AdapterConfirmed(fresh.name, fresh.source))
            return fresh
        with self.known.noting_fault(query.key):
            return await self._flights.run(query, lambda: self._resolve(query, base_path))

    async def _find(self, query: _Query, base_path: str) -> bool:
        found = await self._locate(query, base_path)
        if isinstance(found, tuple):
            self.known.note_located(query.key, found)
        return isinstance(found, tuple)

    def _nobody_waits(self, resolved: ResolvedAdapter | None) -> None:
        if resolved is not None:
            # A name's lease may be in use by another request, so the server decides; other leases are nobody else's.
            if resolved.holder is None:
                self.on_abandoned(resolved)
            else:
                self.store.release(resolved.holder, resolved.path)

    async def _resolve(self, query: _Query, base_path: str) -> ResolvedAdapter | None:
        name = str(query.name)
        for attempt in range(1, _VERSION_CHANGES + 1):
            started = time.perf_counter()
            # `has` may have located the adapter a moment ago.
            located = None if query.force_refresh else self.known.take_located(query.key)
            found = located or await self._locate(query, base_path)
            if isinstance(found, list):
                self.known.disbelieve(query.key)
                if not query.is_by_path:  # a path may be a Hub id too, which vLLM looks up
                    self.events.emit(AdapterUnknown(name, absences=tuple(found)))
                return None
            source, adapter = found
            locate_s = time.perf_counter() - started
            try:
                return await self._serve(query, source, adapter, base_path, locate_s)
            except LoRAPluginsError as error:
                if isinstance(error, VersionChanged) and attempt < _VERSION_CHANGES:
                    continue
                self._report(name, source, error)
                raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _serve(
        self, query: _Query, source: Source, adapter: RemoteAdapter, base_path: str, locate_s: float = 0.0
    ) -> ResolvedAdapter:
        """Bring a located version into the store, and compare the version with the served model."""
        with describing(adapter=str(query.name)):
            base = await self._described_base() or BaseModel(base_path, aliases=self.settings.base_aliases)
            # By path, and without the engine's modules, only the workers can compare the adapter.
            is_compared = base.model is not None or self.settings.base_match is BaseMatch.STRICT
            compared = base if is_compared or not query.is_by_path else None
            return await self._versions.serve(
                query.key, source, adapter, compared, locate_s, holder=query.holder, principal=self.principal()
            )

    async def _described_base(self) -> BaseModel | None:
        """The served model with its modules; the first use asks the engine, which alone knows the modules."""
        # One question to the engine, however many names wait.
        async with self._describing:
            if self.base is None or self.base.model is not None or self.describe_model is None:
                return self.base
            try:
                model = await self.describe_model()
            except Exception as error:
                raise SourceUnavailable(
                    f"no answer of the engine to which modules its model has ({type(error).__name__}: {error})",
                    expected="an engine that runs",
                    remedy="see the server's log",
                ) from error
            self.base = replace(self.base, model=model)
            if model is None:  # LoRA is off, and the answer will not change
                self.describe_model = None
            return self.base

    async def _locate(self, query: _Query, base_path: str) -> AtSource | list[Absence]:
        """The first source that has the adapter, and the adapter's description there; or each source's absence."""
        absences: list[Absence] = []
        unavailable: SourceUnavailable | None = None
        last = self.known.last(*query.key)
        # An operator's URI, a refresh, and a name served before are no flood of unknown names.
        is_known = query.uri is not None or query.force_refresh or last is not None
        with describing(adapter=str(query.name)):
            by_name = [(source, query.name) for source in self.sources]
            asked = by_name if query.uri is None else [self._by_uri.at(query.uri)]
        for source, name in asked:
            key = (source.label, query.key)
            remembered = self.known.absent.get(key)
            if remembered is not None and not query.force_refresh:
                self.events.emit(AbsenceRemembered(str(query.name), source.label))
                absences.append(remembered)
                continue
            try:
                with describing(adapter=str(query.name)):
                    answer = await self._look_ups_at(source).run(
                        partial(source.locate, name, base_path), is_known=is_known, principal=self.principal()
                    )
            except LookUpsBusy as error:
                # Ask no later source: a flood must not decide which source serves the name.
                self.events.emit(LookUpRefused(str(query.name), source.label, error))
                raise
            except LoRAPluginsError as error:
                self._report(str(query.name), source, error)
                came_from = query.force_refresh and last is not None and last.source == source.label
                if came_from or not isinstance(error, SourceUnavailable):
                    raise
                # The first error counts: earlier sources go before later sources.
                unavailable = unavailable or error
            else:
                if not isinstance(answer, Absence):
                    self.known.absent.pop(key, None)
                    return source, answer
                absences.append(answer)
                if source.remote:
                    self.known.absent[key] = replace(answer, is_remembered=True)
        if unavailable is not None:
            raise unavailable
        return absences

    def _look_ups_at(self, source: Source) -> LookUps:
        """The look-ups at one source, so that a source that does not answer blocks no other source."""
        found = self._look_ups.get(id(source))
        if found is None:
            found = self._look_ups[id(source)] = LookUps(_LIMITS, source.label, self.events)
        return found

    def _report(self, name: str, source: Source, error: LoRAPluginsError) -> None:
        is_denied = isinstance(error, RemoteFailure) and error.kind in _OF_ONE_ADAPTER
        is_verdict = not isinstance(error, SourceUnavailable)
        kind = AdapterRejected if is_verdict else AdapterDenied if is_denied else SourceFailed
        self.events.emit(kind(name, source.label, error))
