"""Resolve a name or URI to a verified adapter in the store; every look-up of a process comes through `AdapterResolver`.

Runs on the event loop of an API server, of a worker that lacks an adapter's files, or of the command line. A request's
name, an operator's URI, a path of one of vLLM's own calls, a push (an adapter uploaded to the server) or a digest goes
in; a `ResolvedAdapter` comes out, leased (`store/leases.py`).

A version is an adapter with particular bytes. To locate an adapter is to find the source that has it, and its version
there; to resolve an adapter is to locate, fetch and verify it. The parts: `known_versions.py` remembers, `search.py`
asks the sources, `versions.py` fetches and verifies.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.names import AdapterName, refuse_mixture
from lora_plugins.adapter.verify import VerifiedAdapter
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, SourceUnavailable, describing
from lora_plugins.events import AdapterConfirmed, AdapterResolved, AdapterUnknown, Events, StoreDamaged, StoreEvicted
from lora_plugins.resolvers.chats import Chats
from lora_plugins.resolvers.known_versions import KnownVersions, ResolvedAdapter
from lora_plugins.resolvers.search import LookedUp, Query, SourceSearch
from lora_plugins.resolvers.single_flight import SingleFlight
from lora_plugins.resolvers.sources.mixtures import MixtureSource
from lora_plugins.resolvers.sources.pushed import PushedAdapter, PushSource
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source, VersionChanged, place_in_order
from lora_plugins.resolvers.sources.uri import SourceUri, is_by_path, is_from
from lora_plugins.resolvers.versions import VersionStore, gone
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.store import Store

_VERSION_CHANGES = 3  # tries to locate and fetch an adapter whose files change meanwhile


class AdapterResolver:
    """Answers names and URIs with verified adapters in the store, from one server's sources in their order.

    Concurrent requests for one name share one answer. Answers for a name by a URI are separate from answers for the
    same name at its sources. A returned version is leased until every name that has got the version is released.

    Attributes:
        known: what names mean to this process.
        chats: the chat templates and the like that versions bring.
        base: the served model, set once the server is made; None before.
        on_abandoned: called with a version that is leased for its name, but that no caller has: all callers were
            cancelled, or the caller took a lease of its own.
        principal: returns who has sent the running request; look-ups of new names and fetches take turns by principal
            (`fair_places.py`).
        give_up: ends all look-ups and fetches with `SourceUnavailable`, as no engine is left.
        describe_model: asks the engine for its model's modules, once; the answer is None where LoRA is off. The
            attribute is None where there is nothing (more) to ask.
        lease_served: called with a name and a holder; leases the version that the name serves now for the holder. The
            answer is None where the name is not served; the attribute is None where no names are served.

    Raises:
        InvalidSettings: a malformed prefix in `LORA_PLUGINS_ALLOWED_URIS`.
    """

    def __init__(self, settings: Settings, events: Events, store: Store, sources: Sequence[Source] = ()) -> None:
        self.settings, self.events, self.store = settings, events, store
        store.evictor.on_evict = lambda digest, size_bytes: events.emit(StoreEvicted(digest, size_bytes))
        store.on_damage = lambda digest: events.emit(StoreDamaged(digest))
        self._search = SourceSearch(settings, events, sources)
        self.sources = self._search.sources
        self.base: BaseModel | None = None
        self.principal: Callable[[], Hashable] = lambda: None
        self.describe_model: Callable[[], Awaitable[Model | None]] | None = None
        self._describing = asyncio.Lock()
        self._push_source = PushSource()
        self.known = KnownVersions(settings, store)
        self.chats = Chats(settings, store.layout)
        self._versions = VersionStore(settings, events, store, self.known, self.chats)
        # Every look-up is a task here, also a look-up with a key that no other caller has. A thread may take the lease
        # after the caller's cancellation: the task then goes on, and `_nobody_waits` has the lease released.
        self._flights: SingleFlight[Hashable, LookedUp] = SingleFlight(self._nobody_waits)
        self.give_up = self._flights.give_up
        self.on_abandoned: Callable[[ResolvedAdapter], None] = lambda _: None
        self.lease_served: Callable[[str, Hashable], Awaitable[Path | None]] | None = None
        self._search.mixtures = MixtureSource(settings, store, self._lease_part, self._read_part, lambda: self.base)

    def add(self, source: Source) -> None:
        """Ask this source too, in the order of the settings; a second source with the same label changes nothing."""
        if any(known.label == source.label for known in self.sources):
            return
        self.sources.append(source)
        self.sources.sort(key=lambda item: place_in_order(item, self.settings.sources))

    async def look_up(self, text: str, base_path: str, uri: str | None = None, *, fetches: bool = True) -> LookedUp:
        """Find, fetch and verify the adapter called `text`, at `uri` or else at its sources.

        For a malformed name, the result is absence without answers of sources. For a URI that is malformed, not allowed
        or without an adapter, the result has an error; no error is raised. Without `fetches`, the adapter is only
        located, and the next look-up need not ask the source again.

        `base_path` is the served model's path or Hub id, the stand-in for the base model until `self.base` is set.
        """
        try:
            query = self._query(text, uri)
            fresh = self.known.believed(query.key)
        except AdapterNotFound as error:
            if fetches:
                self.events.emit(AdapterUnknown(text, error.found))
            return LookedUp()
        except LoRAPluginsError as error:
            return LookedUp(error=error)
        if fresh is not None:
            if fetches:
                self.events.emit(AdapterConfirmed(fresh.name, fresh.source))
            return LookedUp(resolved=fresh)
        work = self._resolve if fetches else self._find
        looked = await self._flights.run((query, fetches), lambda: work(query, base_path))
        if looked.error is not None:
            self.known.note_fault(query.key, looked.error)
        # Absence at a URI is an error; so is absence of a name where a source has another program's files (`cause`).
        elif looked.located is None and (uri is not None or any(answer.cause for answer in looked.absences)):
            return replace(looked, error=_absent(text, looked))
        return looked

    async def resolve(self, text: str, base_path: str, uri: str | None = None) -> ResolvedAdapter | None:
        """The version that `look_up` finds; None where the adapter is absent.

        Raises:
            LoRAPluginsError: the adapter cannot be served, or a source is unavailable.
        """
        return (await self.look_up(text, base_path, uri)).version()

    async def has(self, text: str, base_path: str) -> bool:
        """Whether a source has the adapter called `text`; fetches nothing, and `resolve` need not ask again.

        Raises:
            LoRAPluginsError: a source is unavailable, or has no valid adapter there.
        """
        looked = await self.look_up(text, base_path, fetches=False)
        return looked.version() is not None or looked.located is not None

    async def snapshot(self, name: str, path: str, base_path: str, holder: Hashable = None) -> ResolvedAdapter | None:
        """Resolve the adapter that is now at a path (of `place_by_path`), for one of vLLM's own calls.

        The path is a directory, or a repository of the Hub. The path needs no allowed prefix, and `name` may be any
        text. None where the directory has no adapter: perhaps the directory exists only where the workers run. The
        lease is for `holder`, or where None, for the name.

        Raises:
            LoRAPluginsError: the adapter cannot be served, the repository has none, or the source does not answer.
        """
        # No path can have a zero byte, and os calls would raise ValueError.
        if "\0" in path:
            return None
        with describing(adapter=name):
            uri = SourceUri.of_path(path) if os.path.isabs(path) else self._search.by_uri.of_repo(path)
        query = Query(AdapterName(name), uri, force_refresh=True, holder=holder)
        # `object()` makes the key unique, so no earlier caller's task is shared: the files may have changed since.
        looked = await self._flights.run((query, object()), lambda: self._resolve(query, base_path))
        if looked.error is None and looked.located is None and not query.is_by_path:
            # The workers would fetch the repository past every check.
            raise _absent(name, looked)
        return looked.version()

    async def pushed(self, adapter: PushedAdapter, base_path: str) -> ResolvedAdapter:
        """Bring an adapter that was uploaded to the server into the store, verified and leased for its name.

        Raises:
            LoRAPluginsError: the adapter cannot be served.
        """

        async def serve() -> LookedUp:
            return LookedUp(resolved=(await self._serve(Query(adapter.name), self._push_source, adapter, base_path))[0])

        served = (await self._flights.run(object(), serve)).resolved
        return cast("ResolvedAdapter", served)  # `_serve` returns a version, or raises

    async def latest(self, name: str, uri: str | None, base_path: str) -> ResolvedAdapter | None:
        """The newest version of an adapter that `look_up` once returned; `uri` may also be the path of a `snapshot`.

        The source is asked even just after its last answer, and a version that the store lacks is fetched and verified.
        None where no source has the adapter any more. An earlier version in use stays leased.

        Raises:
            LoRAPluginsError: the newest version cannot be served, or the source is unavailable. A later source never
                replaces the source that the adapter last came from.
        """
        if is_by_path(uri):
            return await self.snapshot(name, uri, base_path)
        try:
            newest = replace(self._query(name, uri), force_refresh=True)
        except AdapterNotFound:
            return None
        # `object()` makes the key unique, so no earlier caller's task is shared: that task may have asked the source
        # before the change.
        return (await self._flights.run((newest, object()), lambda: self._resolve(newest, base_path))).version()

    async def of_digest(self, name: str, digest_prefix: str, *, of_any_name: bool = False) -> ResolvedAdapter | None:
        """A version that the store still has, verified and leased for `name`; no source is asked.

        Only versions from places where this process has found `name` count, so that a name cannot reach other names'
        versions; with `of_any_name`, for a caller that knows all 64 characters of the digest, all versions count, and
        the version found is the name's from then on. None where no version or more than one matches, or the prefix is
        shorter than 8 characters.

        Raises:
            LoRAPluginsError: the version does not fit the served model.
        """

        async def find() -> LookedUp:
            base, asker = await self._described_base(), self.principal()
            of_digest = self._versions.of_digest(name, digest_prefix, base, of_any_name=of_any_name, principal=asker)
            return LookedUp(resolved=await of_digest)

        with describing(adapter=name):
            return (await self._flights.run(object(), find)).resolved

    async def restored(self, name: str, uri: str | None, digest: str, place: str) -> ResolvedAdapter | None:
        """The version that an earlier server served, verified and leased for `name`; no source is asked.

        The version then counts as found by this server, at the source whose `place_of` is `place`. None where the store
        no longer has the version; where `uri` is None, and no source of this server looks in `place`; or where the
        version is not from `uri`.

        Raises:
            LoRAPluginsError: the version does not fit the served model, or its URI is no longer allowed.
        """
        query = self._query(name, uri)
        label = self.places.get(place)
        if uri is None and label is None:
            return None  # the sources' settings have changed, and the name may mean another adapter now
        found = await self.of_digest(name, digest, of_any_name=True)
        if found is None:
            return None
        if uri is not None and not is_from(found.uri, uri):
            self.store.release(name, found.path)
            return None
        # The label that `of_digest` finds comes from the URI's scheme, which says nothing for other packages' sources.
        return self.known.note(query.key, found if label is None or uri is not None else replace(found, source=label))

    @property
    def places(self) -> dict[str, str]:
        """Where sources look for names: root, template or repositories, without credentials; each with its label."""
        return {str(source): source.label for source in self.sources}

    def place_of(self, version: ResolvedAdapter) -> str:
        """The place where a version's source looks for names; empty for a version of no source, such as a push."""
        return next((str(source) for source in self.sources if source.label == version.source), "")

    def _query(self, name: str, uri: str | None) -> Query:
        """Check a name, and a URI if given.

        Raises:
            AdapterNotFound: the name is malformed, and there is no URI.
            LoRAPluginsError: the URI is malformed or not allowed, or an adapter at a URI cannot have this name.
        """
        if uri is None:
            return Query(AdapterName.parse(name))
        with describing(adapter=name):
            refuse_mixture(name)
            checked = self._search.by_uri.allowed.check(uri)
            try:
                return Query(AdapterName.parse(name), checked)
            except AdapterNotFound as error:
                raise InvalidAdapter(error.found, expected=error.expected, remedy="choose another name") from None

    async def _lease_part(self, name: str, base_path: str, holder: Hashable) -> Path | None:
        """Lease the version of a part of a mixture: the served version, or else the version that its sources have now.

        The last resort for `NAME@DIGEST` is a version in the store. None where no source and no store has the part.
        """
        if self.lease_served is not None and (path := await self.lease_served(name, holder)) is not None:
            return path
        found = (await self.look_up(name, base_path)).version()
        if found is None and "@" in name:
            found = await self.of_digest(*name.split("@", 1))
        if found is None:
            return None
        leased = await asyncio.to_thread(self.store.acquire, found.digest, holder)
        self.on_abandoned(found)  # the lease for the name is not needed: the holder has a lease of its own
        if leased is None:
            raise gone()
        return leased

    async def _read_part(self, directory: Path) -> VerifiedAdapter:
        return (await self._versions.read(directory, self.principal())).adapter

    async def _find(self, query: Query, base_path: str) -> LookedUp:
        """Locate an adapter without a fetch, and remember the result for a `_resolve` that follows."""
        looked = await self._locate(query, base_path)
        if looked.located is not None:
            self.known.located[query.key] = looked.located
        return looked

    async def _locate(self, query: Query, base_path: str) -> LookedUp:
        return await self._search.locate(query, base_path, self.known.last(*query.key), self.principal())

    def _nobody_waits(self, looked: LookedUp) -> None:
        """Release the lease of a result that no caller has received."""
        if (resolved := looked.resolved) is not None:
            # Another request may use the lease of a name, so `on_abandoned` decides. A holder that the caller has named
            # has no other user.
            if resolved.holder is None:
                self.on_abandoned(resolved)
            else:
                self.store.release(resolved.holder, resolved.path)

    async def _resolve(self, query: Query, base_path: str) -> LookedUp:
        """Locate, fetch and verify an adapter; again, where its version changes meanwhile."""
        name = str(query.name)
        for attempt in range(1, _VERSION_CHANGES + 1):
            started = time.perf_counter()
            # `has` may have located the adapter a moment ago.
            located = None if query.force_refresh else self.known.located.pop(query.key, None)
            looked = await self._locate(query, base_path) if located is None else LookedUp(located=located)
            if looked.error is None and looked.located is None:
                self.known.disbelieve(query.key)
                if not query.is_by_path:  # a directory may exist only where the workers run
                    self.events.emit(AdapterUnknown(name, absences=looked.absences))
            if looked.located is None:
                return looked
            locate_s = time.perf_counter() - started
            try:
                looked.resolved, looked.facts = await self._serve(query, *looked.located, base_path, locate_s)
            except LoRAPluginsError as error:
                if isinstance(error, VersionChanged) and attempt < _VERSION_CHANGES:
                    continue
                self._search.report(name, looked.located[0], error)
                looked.error = error
            return looked
        raise AssertionError("unreachable: the last attempt returns")

    async def _serve(
        self, query: Query, source: Source, adapter: RemoteAdapter, base_path: str, locate_s: float = 0.0
    ) -> tuple[ResolvedAdapter, AdapterResolved | None]:
        """Bring a located version into the store, and compare the version with the served model."""
        with describing(adapter=str(query.name)):
            base = await self._described_base() or BaseModel(base_path, aliases=self.settings.base_aliases)
            # Without the engine's modules, an adapter by path is left for the workers to compare, unless the settings
            # are strict.
            is_compared = base.model is not None or self.settings.base_match is BaseMatch.STRICT
            compared = base if is_compared or not query.is_by_path else None
            return await self._versions.serve(
                query.key, source, adapter, compared, locate_s, holder=query.holder, principal=self.principal()
            )

    async def _described_base(self) -> BaseModel | None:
        """The served model with its modules; the first use asks the engine, which alone knows the modules."""
        # The lock: one question to the engine, however many look-ups wait for the answer.
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


def _absent(name: str, looked: LookedUp) -> LoRAPluginsError:
    """The error for an absent adapter: the `cause` of a source's absence, or else that the URI has no adapter."""
    causes = (answer.cause for answer in looked.absences if answer.cause is not None)
    return next(causes, None) or AdapterNotFound(
        "no adapter at this URI",
        expected="a directory with adapter_config.json and its weights",
        remedy="correct the URI, or put the adapter there",
        adapter=name,
    )
