"""Find where an adapter is: ask the sources of names in order, or the source of a URI.

Runs on the event loop of an API server, of a worker that lacks an adapter's files, or of the command line. In goes a
`Query` (a name, perhaps with a URI); out comes a `LookedUp`, with the answer of each source that was asked, and the
source that has the adapter. No file is fetched here; `resolver.py` adds the fetched version to the result.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cachetools import TTLCache

from lora_plugins.absence import Absence
from lora_plugins.adapter.mixture import terms_of
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable, describing
from lora_plugins.events import (
    AbsenceRemembered,
    AdapterDenied,
    AdapterRejected,
    AdapterResolved,
    Events,
    LookUpRefused,
    SourceFailed,
)
from lora_plugins.resolvers.admission import LookUpLimits, LookUps, LookUpsBusy
from lora_plugins.resolvers.known_versions import AtSource, Key, ResolvedAdapter
from lora_plugins.resolvers.sources.configured import UriSources
from lora_plugins.resolvers.sources.remote_failures import FailureKind, RemoteFailure
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source
from lora_plugins.resolvers.sources.uri import BY_PATH, SourceUri
from lora_plugins.settings import Settings

_REMEMBERED_NAMES = 10_000
# The limits of each source, also of a directory: look-ups there run in threads, and many threads slow the event loop.
_LIMITS = LookUpLimits()
# Failures that concern one adapter while the source works: no outage that should alarm an operator.
_OF_ONE_ADAPTER = frozenset({FailureKind.HIDDEN, FailureKind.GATED})

SourceAnswer = RemoteAdapter | Absence | LoRAPluginsError


@dataclass(frozen=True, slots=True)
class Query:
    """A question: an adapter by its name, or an adapter at a URI, which is then served under the name.

    Attributes:
        uri: where the adapter is; None to ask the sources of names.
        force_refresh: whether to ask again in spite of remembered answers.
        holder: who gets the lease of the version; None for the name itself.
    """

    name: AdapterName
    uri: SourceUri | None = None
    force_refresh: bool = False
    holder: Hashable = None

    @property
    def key(self) -> Key:
        """The name and the URI, by which answers are remembered."""
        return str(self.name), "" if self.uri is None else str(self.uri)

    @property
    def is_by_path(self) -> bool:
        """Whether the query is for a directory that one of vLLM's own calls has named by its path."""
        return self.uri is not None and self.uri.scheme == BY_PATH


@dataclass(slots=True)
class LookedUp:
    """What a look-up has found out; without a version and an error, every source answers that the adapter is absent.

    Attributes:
        answers: of the sources that were asked, by label, in their order; empty where an earlier answer still counts.
        located: the source that has the adapter, and the adapter there; None where no source was asked or has it.
        resolved: the version in the store, leased; None before the fetch, and without a version.
        facts: times, notes, and whether the version was fetched; None where an earlier answer still counts.
        error: why there is no version; None where the adapter was found, or is absent.
    """

    answers: dict[str, SourceAnswer] = field(default_factory=dict)
    located: AtSource | None = None
    resolved: ResolvedAdapter | None = None
    facts: AdapterResolved | None = None
    error: LoRAPluginsError | None = None

    @property
    def absences(self) -> tuple[Absence, ...]:
        return tuple(answer for answer in self.answers.values() if isinstance(answer, Absence))

    def version(self) -> ResolvedAdapter | None:
        """The version, or None where the adapter is absent.

        Raises:
            LoRAPluginsError: `error`.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)  # concurrent requests raise one object, whose traceback would grow
        return self.resolved


class SourceSearch:
    """The sources of one server, in their order, and recent absences. For one event loop.

    The first source that has a name decides. An unavailable source does not hide later sources; if no later source has
    the name either, its error is the result, because "no such adapter" would be a guess. Where a refresh meets an error
    of the source that the adapter last came from, no later source may replace that source.

    Attributes:
        sources: the sources of names.
        by_uri: the sources of URIs.
        mixtures: the source of names that are weighted sums of adapters; None where mixtures cannot be made.

    Raises:
        InvalidSettings: a malformed prefix in `LORA_PLUGINS_ALLOWED_URIS`.
    """

    def __init__(self, settings: Settings, events: Events, sources: Sequence[Source] = ()) -> None:
        self.sources, self.by_uri = list(sources), UriSources(settings)
        self.mixtures: Source | None = None
        self._events = events
        # By the source's label and the query's key.
        self._absent: TTLCache[tuple[str, Key], Absence] = TTLCache(_REMEMBERED_NAMES, settings.absent_ttl_s)
        # By `id` of the source; limits for each source, so that a source that does not answer blocks no other.
        self._look_ups: dict[int, LookUps] = {}

    async def locate(
        self, query: Query, base_path: str, last: ResolvedAdapter | None = None, principal: Hashable = None
    ) -> LookedUp:
        """Ask until a source has the adapter; look-ups of new names take turns by principal.

        `last` is the version that the query found before; None for a new name. An error is in the result, not raised.
        """
        looked, name = LookedUp(), str(query.name)
        # False for a name that may be one of a flood of unknown names, which `admission.py` limits.
        is_known = query.uri is not None or query.force_refresh or last is not None
        unavailable: SourceUnavailable | None = None
        try:
            with describing(adapter=name):
                asked = self._asked(query)
        except SourceUnavailable as error:
            return LookedUp(error=error)
        for source, name_there in asked:
            key = (source.label, query.key)
            remembered = self._absent.get(key)
            if remembered is not None and not query.force_refresh:
                self._events.emit(AbsenceRemembered(name, source.label))
                looked.answers[source.label] = remembered
                continue
            ask = partial(source.locate, name_there, base_path)
            try:
                with describing(adapter=name):
                    if source is self.mixtures:  # the look-up of each part takes a place at the part's own source
                        answer = await ask()
                    else:
                        answer = await self._look_ups_of(source).run(ask, is_known=is_known, principal=principal)
            except LookUpsBusy as error:
                # Ask no later source: a flood must not decide which source serves the name.
                self._events.emit(LookUpRefused(name, source.label, error))
                looked.error = error
                return looked
            except LoRAPluginsError as error:
                self.report(name, source, error)
                looked.answers[source.label] = error
                came_from = query.force_refresh and last is not None and last.source == source.label
                # A source that has the adapter, but with a fault, decides too.
                if came_from or not isinstance(error, SourceUnavailable):
                    looked.error = error
                    return looked
                # Of several errors, the result is the error of the first source in order.
                unavailable = unavailable or error
                continue
            looked.answers[source.label] = answer
            if not isinstance(answer, Absence):
                self._absent.pop(key, None)
                looked.located = source, answer
                return looked
            if source.remote:  # a look into a local directory costs little
                self._absent[key] = replace(answer, is_remembered=True)
        looked.error = unavailable
        return looked

    def _asked(self, query: Query) -> Sequence[tuple[Source, AdapterName]]:
        """The sources to ask for a query, in order, each with the name by which the source knows the adapter."""
        if query.uri is not None:
            return [self.by_uri.at(query.uri)]
        if self.mixtures is not None and terms_of(str(query.name)) is not None:
            return [(self.mixtures, query.name)]
        return [(source, query.name) for source in self.sources]

    def _look_ups_of(self, source: Source) -> LookUps:
        if (look_ups := self._look_ups.get(id(source))) is None:
            look_ups = self._look_ups[id(source)] = LookUps(_LIMITS, source.label, self._events)
        return look_ups

    def report(self, name: str, source: Source, error: LoRAPluginsError) -> None:
        """Emit the event for a source's error.

        `AdapterRejected` for a fault of the adapter, `AdapterDenied` for missing access to it, `SourceFailed` for an
        outage of the source.
        """
        is_denied = isinstance(error, RemoteFailure) and error.kind in _OF_ONE_ADAPTER
        is_verdict = not isinstance(error, SourceUnavailable)
        kind = AdapterRejected if is_verdict else AdapterDenied if is_denied else SourceFailed
        self._events.emit(kind(name, source.label, error))
