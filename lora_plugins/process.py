"""The composition root: what one process of vLLM has once, whichever of our plugins run in it.

vLLM runs several processes (API server, engine cores, workers) and calls the plugin functions in each of them; a
forked one has its parent's, whose sources have not been opened then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.api.access.policy import Policy
from lora_plugins.api.access.principals import label_of_request
from lora_plugins.errors import InvalidSettings
from lora_plugins.events import Events
from lora_plugins.findings import discovered_plugins, unknown_plugins
from lora_plugins.log import logger
from lora_plugins.observability.logs import LogEvents
from lora_plugins.observability.scrape import StoreUsageReader
from lora_plugins.plugin_names import OURS
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.server.copies import Copies
from lora_plugins.server.follower import Follower
from lora_plugins.server.leader import Leader
from lora_plugins.server.lifecycle import Lifecycle
from lora_plugins.server.planner_client import PlannerClient
from lora_plugins.server.snapshots import Snapshots
from lora_plugins.settings import BaseMatch, Settings, environment
from lora_plugins.store.opening import open_store

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Process:
    """What the patches of one process share.

    Attributes:
        policy: the access policy that its API server keeps to.
        lets_in_administrators_only: whether its API server asks who wants to change what is served.
        is_manager_patched: whether adapters are planned and loaded our way.
        is_resolver_registered: whether vLLM asks our resolver.
        counted: the metrics that are counted from events. store_usage: what the store's metrics remember.
        planners, lifecycles: by vLLM's `AsyncLLM`, and by its `OpenAIServingModels`.
        copies: of what is served, by vLLM's `AsyncLLM`.
        snapshots: by vLLM's `AsyncLLM` or `LLMEngine`.
        app: its API server's application.
        role: of its API server among several; None where it is the only one.
    """

    def __init__(self, settings: Settings | None = None, known_sources: Sequence[Source] = ()) -> None:
        """Make one; without `settings`, those of the environment are read at the first use."""
        if settings is not None:
            self.settings = settings
        self.log = LogEvents()
        self.events = Events(self.log)
        self.policy: Policy | None = None
        self.lets_in_administrators_only = False
        self.is_manager_patched = False
        self.is_resolver_registered = False
        self.counted: CollectorRegistry | None = None
        self.store_usage = StoreUsageReader()
        self.planners: WeakKeyDictionary[Any, PlannerClient] = WeakKeyDictionary()
        self.lifecycles: WeakKeyDictionary[Any, Lifecycle] = WeakKeyDictionary()
        self.copies: WeakKeyDictionary[Any, Copies] = WeakKeyDictionary()
        self.snapshots: WeakKeyDictionary[Any, Snapshots] = WeakKeyDictionary()
        self.app: Any = None
        self.role: Leader | Follower | None = None
        self._known_sources = list(known_sources)
        self._warned_of_plugins = False

    @functools.cached_property
    def settings(self) -> Settings:
        """What the environment asks for, read once.

        Raises:
            InvalidSettings: a variable cannot be right.
        """
        return Settings.from_env()

    def warn_of_misspelt_plugins(self) -> None:
        """Log, once, which names in `VLLM_PLUGINS` look like ours and are none of an installed package."""
        if self._warned_of_plugins:
            return
        self._warned_of_plugins = True
        if not any(unknown_plugins(environment(), OURS, only_ours=True)):
            return  # what other packages have takes a tenth of a second to read
        for finding in unknown_plugins(environment(), discovered_plugins(), only_ours=True):
            logger.warning("%s", finding)

    def may_lead(self, name: str, place: str) -> bool:
        """Whether a link may make what lies at `place` below the adapters' root the adapter `name`: see `Policy`."""
        return self.policy is None or self.policy.may_lead(name, place)

    def add_source(self, source: Source) -> None:
        """Resolve names from this source too."""
        self._known_sources.append(source)

    @functools.cached_property
    def resolver(self) -> AdapterResolver:
        """An API server's; threads and store are made here, as only an API server comes to it.

        Raises:
            InvalidSettings: the store cannot be made.
        """
        return self._open(self.settings)

    @property
    def has_opened_resolver(self) -> bool:
        """Whether `resolver` has been used."""
        return "resolver" in vars(self)

    def resolver_of_worker(self, base: BaseModel | None = None) -> AdapterResolver | None:
        """Another one with the same sources, for a worker that lacks an adapter's files.

        None where no plugin of a resolver is named, and there can be no store.

        The base model is not looked at: the API server has, and the worker will match every tensor with its model.
        """
        try:
            resolver = self._open(replace(self.settings, base_match=BaseMatch.OFF))
        except InvalidSettings:
            if self.is_resolver_registered:
                raise
            return None
        resolver.base = base
        return resolver

    def _open(self, settings: Settings) -> AdapterResolver:
        resolver = AdapterResolver(settings, self.events, open_store(settings))
        resolver.principal = label_of_request
        for source in self._known_sources:
            resolver.add(source)
        return resolver


_process = Process()


def moves_running() -> bool:
    """Whether running requests move to the version that one of vLLM's own calls puts in the place of theirs."""
    return _process.settings.load_inplace == "inflight"


def this_process() -> Process:
    """The one of this process."""
    return _process
