"""What callers of one engine client name by a path: the copy in the store that each engine id stands for.

The engine is given the copy's path, which says the bytes: files that change or go afterwards change nothing, and what
is cached of other bytes is not found. No vLLM, no torch; for one event loop at a time.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.uri import absolute
from lora_plugins.resolvers.versions import ResolvedAdapter
from lora_plugins.server.name_locks import NameLocks

REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class _Kept:
    """The path that a caller gave, its copy, and what was before, which requests that still run may need."""

    given: str
    version: ResolvedAdapter
    before: _Kept | None = None


class Snapshots:
    """Takes them, and leases them for as long as they are remembered.

    `is_vllms` says of a request whether it is vLLM's `LoRARequest`; those of other classes, and those with a path
    in the store, stay as they are.
    """

    def __init__(self, resolver: AdapterResolver, is_vllms: Callable[[Any], bool], base_path: str) -> None:
        self._resolver = resolver
        self._is_vllms = is_vllms
        self._base_path = base_path
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._trying: dict[int, object] = {}
        self._locks = NameLocks()

    async def of(self, request: Any) -> Any:
        """What the engine is given in the place of a caller's request, which stays as it is.

        With `load_inplace`, a copy of what lies at its path now; else what its engine id stands for, unless its path
        is another directory. A path where no adapter lies is left as it is where the id stands for nothing.

        Raises:
            LoRAPluginsError: what lies there cannot be served.
        """
        if (known := self.known(request)) is not None:
            return known
        async with self._lock(request):
            if (known := self.known(request)) is not None:
                return known
            version, kept = await self.take(request), self._kept.get(request.lora_int_id)
            if version is None:
                return request if kept is None or request.load_inplace else _at(kept.version, request)
            with self.trying(request, version) as found:
                return found

    def known(self, request: Any) -> Any:
        """What `of` gives where nothing has to be read for it; else None."""
        if self._stays(request):
            return request
        kept = self._kept.get(request.lora_int_id)
        if kept is None or kept.given != request.lora_path or request.load_inplace:
            return None
        self._kept.move_to_end(request.lora_int_id)
        return _at(kept.version, request)

    async def take(self, request: Any) -> ResolvedAdapter | None:
        """A copy of what lies at the path of a request now, for `trying`; None where the request stays as it is."""
        if self._stays(request):
            return None
        path = absolute(request.lora_path)
        return await self._resolver.snapshot(request.lora_name, path, self._base_path, holder=object())

    @contextmanager
    def trying(self, request: Any, version: ResolvedAdapter | None) -> Iterator[Any]:
        """Inside, the engine loads what this gives; the engine id stands for `version` then.

        It does not where that raises, or where it is forgotten meanwhile.
        """
        engine_id, this = request.lora_int_id, object()
        kept = None if version is None else _Kept(request.lora_path, version)
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

    @asynccontextmanager
    async def adding(self, request: Any) -> AsyncIterator[Any]:
        """As `take` and `trying`; one after the other for each engine id, as the engine takes them up."""
        async with self._lock(request):
            with self.trying(request, await self.take(request)) as taken:
                yield taken

    def forget(self, engine_id: int) -> None:
        """An engine id stands for nothing any more."""
        self._trying.pop(engine_id, None)
        self._drop(self._kept.pop(engine_id, None))

    def forget_all(self) -> None:
        """The engine client is gone."""
        for engine_id in [*self._kept, *self._trying]:
            self.forget(engine_id)

    def refused(self, taken: Any, error: LoRAPluginsError) -> None:
        """The engine refuses what `of` gave: where it is for its bytes, the id stands for what it did before."""
        kept = self._kept.get(taken.lora_int_id)
        is_for_bytes = isinstance(error, InvalidAdapter | IncompatibleAdapter)
        if not is_for_bytes or kept is None or str(kept.version.path) != taken.lora_path:
            return
        if kept.before is None:
            self.forget(taken.lora_int_id)
        else:
            self._kept[taken.lora_int_id] = kept.before
            self._drop(replace(kept, before=None))

    def _remember(self, engine_id: int, kept: _Kept | None) -> None:
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

    def _drop(self, kept: _Kept | None) -> None:
        while kept is not None:
            self._resolver.store.release(kept.version.holder, kept.version.path)
            kept = kept.before

    def _lock(self, request: Any) -> asyncio.Lock:
        return self._locks[str(request.lora_int_id)]

    def _stays(self, request: Any) -> bool:
        return not self._is_vllms(request) or self._resolver.store.layout.digest_of(request.lora_path) is not None


def _at(version: ResolvedAdapter, request: Any) -> Any:
    found = copy.copy(request)
    found.lora_path, found.is_3d_lora_weight = str(version.path), version.is_3d
    return found
