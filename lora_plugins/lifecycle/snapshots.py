"""Snapshots: copies in the store of adapters that callers of vLLM's engine client name by a path.

Runs wherever an engine client is: in API servers, and in programs with vLLM's `LLM` or `AsyncLLM`. A caller's
`LoRARequest`, from `add_lora` or with a prompt, comes in; out comes the request for the engine, with the path of the
copy. The copy's path stands for fixed bytes: later changes of the caller's files change nothing, and keys of cached
prefixes, which hold the path, never mix two contents. Copies are remembered by engine id (`lora_int_id`), because in
vLLM a later request may name an adapter by the id alone, beside any path. No vLLM, no torch; for one event loop at a
time.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from lora_plugins.resolvers.known_versions import ResolvedAdapter
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.single_flight import NameLocks
from lora_plugins.resolvers.sources.uri import place_by_path

REMEMBERED = 10_000  # engine ids
_NOWHERE = "/dev/null/"  # a request's path below names no file: only the engines have the adapter
Held = Callable[[], Awaitable[Collection[int]]]


@dataclass(frozen=True, slots=True)
class _KeptSnapshot:
    """What an engine id stands for.

    Attributes:
        given: the path that the caller named.
        version: the copy of the files at the path; None where only the engines have the adapter.
        before: the engine id's former copy, which running requests may still need.
    """

    given: str
    version: ResolvedAdapter | None
    before: _KeptSnapshot | None = None


class Snapshots:
    """The copies of one engine client, leased in the store for as long as their engine ids are remembered.

    Requests that are not vLLM's `LoRARequest`, and requests with a path in the store, stay as they are.

    Args:
        is_vllms: whether a request is vLLM's `LoRARequest`.
        base_path: the base model's path or Hub id.
        held: returns the engine ids of the adapters that the engines have now.
    """

    def __init__(self, resolver: AdapterResolver, is_vllms: Callable[[Any], bool], base_path: str, held: Held) -> None:
        self._resolver = resolver
        self._is_vllms = is_vllms
        self._base_path = base_path
        self._held = held
        self._kept: OrderedDict[int, _KeptSnapshot] = OrderedDict()  # by engine id
        self._trying: dict[int, object] = {}  # by engine id, a mark of the latest `trying`, while the load runs
        self._locks = NameLocks()  # of engine ids

    async def of(self, request: Any) -> Any:
        """The request for the engine in the place of a prompt's request, which is not changed itself.

        A request with `load_inplace` gets a copy of the files now at the request's path. Any other request gets the
        copy that its engine id stands for, unless the request's path is another directory, which is copied. Where
        neither path nor engine id has an adapter, the caller's request is returned.

        Raises:
            LoRAPluginsError: the adapter at the path cannot be served.
        """
        if (known := self.known(request)) is not None:
            return known
        async with self._lock(request):
            # Another caller may have taken the copy while this caller waited for the lock.
            if (known := self.known(request) or await self.by_id(request, adds=False)) is not None:
                return known
            version, kept = await self.take(request), self._kept.get(request.lora_int_id)
            if version is None:  # this host has no adapter at the path
                return request if kept is None or request.load_inplace else _at(kept.version, request)
            with self.trying(request, version) as found:
                return found

    def known(self, request: Any) -> Any:
        """The request for the engine, as `of` returns, if known without reading a file; else None."""
        if self._stays(request):
            return request
        kept = self._kept.get(request.lora_int_id)
        if kept is None or kept.given != request.lora_path or request.load_inplace:
            return None
        self._kept.move_to_end(request.lora_int_id)
        return _at(kept.version, request)

    @asynccontextmanager
    async def adding(self, request: Any) -> AsyncIterator[Any]:
        """Inside, the engine adds the yielded request: the request of `by_id` if any, else a new copy, as in `trying`.

        Calls with one engine id wait for each other.
        """
        async with self._lock(request):
            if (known := await self.by_id(request)) is not None:
                yield known
                return
            with self.trying(request, await self.take(request)) as taken:
                yield taken

    async def by_id(self, request: Any, *, adds: bool = True) -> Any:
        """The request for the engine where the engine id alone says which adapter is meant; else None.

        In vLLM the id alone counts once an adapter is loaded, and trainers send stub paths with later requests. So
        where this object or the engines have the id, the path is ignored, although it may name a repository of the Hub.
        With `load_inplace`, or with a directory of this host, the path decides. `adds`: the request comes from
        `add_lora`, not with a prompt.
        """
        engine_id, path, kept = request.lora_int_id, request.lora_path, self._kept.get(request.lora_int_id)
        if self._stays(request) or request.load_inplace or place_by_path(path).startswith("/"):
            return None
        if kept is None:
            asks_engines = True
        elif kept.version is None:
            # Engines cannot load tensors again; a prompt's request learns so by its own failure.
            asks_engines = adds
        else:
            # Engines load an evicted adapter again from its copy, so the copy's own name needs no question.
            asks_engines = kept.version.name != request.lora_name
        if asks_engines and engine_id not in await self._held():
            return None
        # Only the engines have the adapter from now on. An entry that says so already is not entered again, or its
        # `before` would say the same, and `refused` would restore what was refused.
        if kept is None or (asks_engines and kept.version is not None):
            self._remember(engine_id, kept := _KeptSnapshot(path, None))
        return _at(kept.version, request)

    async def take(self, request: Any) -> ResolvedAdapter | None:
        """A copy of the files now at the path of a request, for `trying`; None where the request stays as it is."""
        if self._stays(request):
            return None
        path = place_by_path(request.lora_path)
        return await self._resolver.snapshot(request.lora_name, path, self._base_path, holder=object())

    @contextmanager
    def trying(self, request: Any, version: ResolvedAdapter | None) -> Iterator[Any]:
        """Inside, the engine loads the yielded request; after success, the engine id stands for `version`.

        Where the load raises, or `forget` comes during the load, the new version is dropped.
        """
        engine_id, this = request.lora_int_id, object()
        # A request of another class may bring weights that no path names, so only the engines have its adapter.
        kept = None if version is None and self._is_vllms(request) else _KeptSnapshot(request.lora_path, version)
        # `forget`, or a later call for the id, replaces or removes this mark: then nobody needs this call's copy.
        self._trying[engine_id] = this
        try:
            yield request if version is None else _at(version, request)
        except BaseException:
            self._drop(kept)
            raise
        else:
            if self._trying.get(engine_id) is this:
                self._remember(engine_id, kept)
            else:
                self._drop(kept)
        finally:
            if self._trying.get(engine_id) is this:
                del self._trying[engine_id]

    def forget(self, engine_id: int) -> None:
        """End the leases of an engine id's copies, so that the store may remove the files.

        The lease of a copy that is being loaded ends with the load.
        """
        self._trying.pop(engine_id, None)
        self._drop(self._kept.pop(engine_id, None))

    def forget_all(self) -> None:
        """Drop all copies, because the engine client is gone."""
        for engine_id in [*self._kept, *self._trying]:
            self.forget(engine_id)

    def refused(self, taken: Any, error: LoRAPluginsError) -> None:
        """Note an engine's refusal of a request that `of` has returned.

        Where a retry would be refused too, the engine id stands for its former copy again, or for nothing without one.
        """
        kept = self._kept.get(taken.lora_int_id)
        # Another copy has taken the id meanwhile: the refusal says nothing about the other copy.
        if kept is None or (kept.version is not None and str(kept.version.path) != taken.lora_path):
            return
        is_gone = kept.version is None and isinstance(error, AdapterNotFound)  # the workers have the adapter no more
        if not (is_gone or isinstance(error, InvalidAdapter | IncompatibleAdapter)):
            return
        if kept.before is None:
            self.forget(taken.lora_int_id)
        else:
            self._kept[taken.lora_int_id] = kept.before
            self._drop(replace(kept, before=None))

    def _remember(self, engine_id: int, kept: _KeptSnapshot | None) -> None:
        """Have an engine id stand for a copy from now on, or for none; one former copy stays for running requests."""
        old = self._kept.pop(engine_id, None)
        if kept is None:
            self._drop(old)
            return
        if old is not None:
            self._drop(old.before)
            kept = replace(kept, before=replace(old, before=None))
        self._kept[engine_id] = kept
        if len(self._kept) > REMEMBERED:
            self.forget(next(iter(self._kept)))

    def _drop(self, kept: _KeptSnapshot | None) -> None:
        # The former copy too, if any.
        while kept is not None:
            if kept.version is not None:
                self._resolver.store.release(kept.version.holder, kept.version.path)
            kept = kept.before

    def _lock(self, request: Any) -> asyncio.Lock:
        return self._locks[str(request.lora_int_id)]

    def _stays(self, request: Any) -> bool:
        return not self._is_vllms(request) or self._resolver.store.layout.digest_of(request.lora_path) is not None


def only_engines_have(taken: Any) -> bool:
    """Whether a request that `Snapshots` has returned names an adapter by its engine id alone, without any file."""
    return bool(taken.lora_path.startswith(_NOWHERE))


def _at(version: ResolvedAdapter | None, request: Any) -> Any:
    found = copy.copy(request)
    # Absolute in any case: workers would look for a relative path on the Hub, past every check.
    found.lora_path = f"{_NOWHERE}{request.lora_path}" if version is None else str(version.path)
    return found
