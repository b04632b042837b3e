"""The composition root: the objects that a process of vLLM has once, whichever of our plugins run there.

vLLM runs several processes (API server, engine cores, workers) and calls the plugin functions in each process. A
forked process has its parent's objects, whose sources have not been opened at the fork.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.api.access.policy import Policy
from lora_plugins.api.access.principals import label_of_request
from lora_plugins.errors import InvalidSettings
from lora_plugins.events import Events
from lora_plugins.lifecycle.follower import Follower
from lora_plugins.lifecycle.leader import Leader
from lora_plugins.lifecycle.principal_limits import Rates
from lora_plugins.observability.logs import LogEvents
from lora_plugins.resolvers.listed_names import ListedNames, RefusedNames
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.store import open_store

if TYPE_CHECKING:
    from lora_plugins.observability.scrape import MetricsCollector


class Process:
    """The state that the patches of one process share.

    Attributes:
        policy: the access policy of this process's API server.
        rates: the requests and tokens of the policy's principals.
        lets_in_administrators_only: whether the API server asks who wants to change the served adapters.
        refused: names whose adapter was refused a moment ago.
        is_manager_patched: whether adapters are planned and loaded our way.
        is_resolver_registered: whether vLLM asks our resolver.
        collector: of our metrics, once there is an application.
        models: returns vLLM's `OpenAIServingModels`; None where there is no API server, or no longer.
        app: the API server's application.
        folder: where the API servers of this deployment find each other; None for a single server.
        role: of the API server among several; a single server leads.
    """

    def __init__(self, settings: Settings | None = None, known_sources: Sequence[Source] = ()) -> None:
        """Make the state; without `settings`, the environment is read at the first use of settings."""
        if settings is not None:
            self.settings = settings
        self.log = LogEvents()
        self.refused = RefusedNames()
        self.events = Events(self.log, self.refused)
        self.policy: Policy | None = None
        self.rates = Rates()
        self.lets_in_administrators_only = False
        self.is_manager_patched = False
        self.is_resolver_registered = False
        self.collector: MetricsCollector | None = None
        self.models: Callable[[], Any] = lambda: None
        self.app: Any = None
        self.folder: Path | None = None
        self.role: Leader | Follower = Leader()
        self._known_sources = list(known_sources)

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings of the environment, read once.

        Raises:
            InvalidSettings: a variable cannot be right.
        """
        return Settings.from_env()

    def may_lead(self, name: str, place: str) -> bool:
        """Return whether a link may turn the files at `place`, below the adapters' root, into `name`: see `Policy`."""
        return self.policy is None or self.policy.may_lead(name, place)

    def add_source(self, source: Source) -> None:
        self._known_sources.append(source)

    @functools.cached_property
    def resolver(self) -> AdapterResolver:
        """The resolver of an API server; only API servers come here, and so make threads and a store.

        Raises:
            InvalidSettings: the store cannot be made.
        """
        return self._open(self.settings)

    @functools.cached_property
    def listed_names(self) -> ListedNames:
        return ListedNames(self._known_sources, self.settings.revalidate_s)

    @property
    def has_opened_resolver(self) -> bool:
        """Whether `resolver` has been used."""
        return "resolver" in vars(self)

    def size_of(self, path: str) -> int:
        """Return the bytes of configuration and weights at a path of the store; 0 where this process knows none."""
        return self.resolver.known.sizes_bytes.get(os.path.basename(path), 0) if self.has_opened_resolver else 0

    def resolver_of_worker(self, base: BaseModel | None = None) -> AdapterResolver | None:
        """Return a new resolver with the same sources, for a worker that lacks an adapter's files.

        None where no plugin of a resolver is named, and no store can be had.

        The resolver skips the base model: the API server has compared the base model, and the worker will match every
        tensor with its model.
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
    """Return whether vLLM's own calls move running requests to the new version of their adapter."""
    return _process.settings.load_inplace == "inflight"


def this_process() -> Process:
    return _process
