"""The reconciler: the adapters that a server is to serve, and the one loop that has them served.

Runs in the event loop of the leading API server: `endpoint_plugin.py` awaits `start` before the server is ready, and
then runs `follow` and `poll` as tasks. Names come in, with a place, a digest or a pin where given; `lifecycle.py`
serves, swaps and unloads the names, and `served_writer.py` writes the list of served names. "The file" is below
always the file of `LORA_PLUGINS_ADAPTERS_FILE`; its adapters are *declared*. The written list is "the list".

Three places name adapters: `LORA_PLUGINS_PRELOAD`, the list of the last server (`LORA_PLUGINS_RESTORE`), and the file
of `LORA_PLUGINS_ADAPTERS_FILE`. The loop follows the file while the server runs, and the file decides over the names in
the file. The other two are read at the start, and only add names. Between two changes of the file only failed adapters
are tried again: an administrator's swap, unload or rollback stays. The list has the served names outside the file, and
the rollbacks of names in the file. A rollback lasts without `LORA_PLUGINS_RESTORE` too: a restart must not serve the
version that an operator has rolled back from.

Adapters of the last server are served from the store before the server is ready, and only then the sources are asked
for newer versions: an outage of a source neither takes away an adapter in the store, nor holds back the start. Adapters
that the store has lost are fetched once the server is ready. Every `LORA_PLUGINS_REFRESH_S` the sources are asked for
newer versions of all served adapters.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NoReturn

from lora_plugins.adapter.mixture import canonical
from lora_plugins.adapter.names import is_by_digest
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError, OfAdapter, SourceUnavailable
from lora_plugins.events import DeclaredFileInvalid, DeclaredSetReconciled, Events, NotServed, polling
from lora_plugins.lifecycle.background_tasks import FewAtOnce, background, in_steps
from lora_plugins.lifecycle.declared_file import parse, parse_apart, read_bytes
from lora_plugins.lifecycle.lifecycle import Lifecycle
from lora_plugins.lifecycle.registry import DesiredAdapter, ServedAdapter
from lora_plugins.lifecycle.served_file import Fields, ServedFile
from lora_plugins.lifecycle.served_writer import ServedWriter
from lora_plugins.log import logger
from lora_plugins.resolvers.sources.uri import AllowedUris
from lora_plugins.settings import Settings
from lora_plugins.store.disk_errors import store_errors

LOOK_INTERVAL_S = 2.0  # a mounted ConfigMap shows a change after about a minute
RETRY_S = 4.0  # a fault is remembered for a moment besides: together less than 5 s
_AT_ONCE = 4  # loads of one bucket, organisation or directory, and polls of one source: a hanging source stops no other
_JITTER = 0.2
# Restored names, from which on `gc.freeze` takes them out of garbage collections, each of which would visit them all.
_FROZEN_FROM = 5_000


@dataclass(slots=True)
class Target:
    """One adapter to serve, and the result so far.

    Attributes:
        is_declared: the file declares the adapter; else the settings or the last server's list do.
        is_done: nothing is left to try: the adapter is served as wanted, or an undeclared adapter was given up, because
            its error is permanent or because an operator has loaded or blocked the name meanwhile.
        error: the error of the last try; None before a try, and after a success.
    """

    adapter: DesiredAdapter
    is_declared: bool = False
    is_done: bool = False
    error: LoRAPluginsError | None = None


class Reconciler:
    """Serves the wanted adapters, and unloads adapters that the file no longer declares.

    Args:
        served: the list of served names on disk: read at the start, written at every change.

    Attributes:
        file_error: why the present content of the file is not followed; None where it is followed.
    """

    def __init__(self, lifecycle: Lifecycle, settings: Settings, served: ServedFile, events: Events) -> None:
        self.file_error: LoRAPluginsError | None = None
        self._lifecycle = lifecycle
        self._settings = settings
        self._served = served
        self._events = events
        self._targets: dict[str, Target] = {}
        self._serving = FewAtOnce(
            self._serve,
            lambda target: "/".join((target.adapter.uri or "").split("/")[:3]),  # s3://bucket, hf://organisation
            limit=_AT_ONCE,
            on_idle=self._report,
        )
        self._content: bytes | None = None  # of the file at the last look; None where it could not be read
        self._reported: DeclaredSetReconciled | None = None
        self._writer = ServedWriter(served, self._what_is_served)
        self._is_started = False
        # Adapters restored from the store whose sources have not yet answered whether a newer version exists.
        self._stale: dict[str, ServedAdapter] = {}
        self._asking = FewAtOnce(
            self._ask_for_newer,
            lambda adapter: "" if adapter.version is None else adapter.version.source,
            limit=_AT_ONCE,
        )

    @property
    def declared(self) -> dict[str, Target] | None:
        """The file's adapters, by name and in the file's order; None without a file."""
        if self._settings.adapters_file is None:
            return None
        return {name: target for name, target in self._targets.items() if target.is_declared}

    async def start(self) -> None:
        """Serve the adapters of the start before the server is ready: one try for each, with one deadline for all.

        Raises:
            InvalidSettings: the file of declared adapters has an error.
            SourceUnavailable, OutOfMemory: the list of the last server cannot be read or copied at the moment.
        """
        started, path = time.perf_counter(), self._settings.adapters_file
        deadline_s = self._settings.fetch_timeout_s  # for all adapters together: a hanging source must not add up
        self._targets = {name: Target(DesiredAdapter(name)) for name in map(canonical, self._settings.preload)}
        rolled_back = await self._restore()  # of names that the last server's file declared
        if path is not None:
            self._content = content = await asyncio.to_thread(read_bytes, path)
            entries = dict(parse(content, path, AllowedUris.parse(self._settings.allowed_uris)))
            for name in rolled_back.keys() & entries.keys():
                # The rollback lasts where the file names the same place as then, and no digest of its own.
                if (entries[name].uri, entries[name].held_digest) == (rolled_back[name].uri, None):
                    entries[name] = replace(entries[name], last_digest=rolled_back[name].held_digest)
            await self._declare(entries)
        # What is not awaited, `follow` serves once the server is ready.
        awaited = [target for target in self._targets.values() if target.adapter.is_awaited]
        try:
            await self._begin(awaited)
            with suppress(TimeoutError):  # the loads go on, and `follow` reports their results
                async with asyncio.timeout(deadline_s):
                    await self._serving.idle()
        except asyncio.CancelledError:
            self._serving.end_all()
            raise
        self._is_started = True
        self._report()
        if self._serving:
            logger.warning(
                "%d adapters are not loaded after %.0f s (LORA_PLUGINS_FETCH_TIMEOUT_S): the server is ready, "
                "and goes on loading them",
                len(self._serving),
                deadline_s,
            )
        if awaited:
            logger.info(
                "%d of %d adapters are served from the start, after %.1f s",
                sum(target.is_done and target.error is None for target in awaited),
                len(awaited),
                time.perf_counter() - started,
            )
        # Connect the writer only now, so that the loads of the start do not write the list again and again.
        self._lifecycle.server.on_change, self._lifecycle.written = self._writer.write_soon, self._writer.written
        self._writer.write_soon()

    async def follow(self) -> None:
        """Serve the rest, and follow the file's changes; retry failed adapters.

        Without a file, returns once every adapter is done, and every restored adapter's source has answered. A source
        that does not answer delays no other source.
        """
        path, waited_s = self._settings.adapters_file, 0.0
        try:
            await self._begin_asking(list(self._stale.values()))
            # Targets without an error were not tried before the server was ready; failed targets wait for the retry.
            await self._begin(target for target in self._targets.values() if target.error is None)
            while path is not None or self._stale or not all(target.is_done for target in self._targets.values()):
                await asyncio.sleep(LOOK_INTERVAL_S)
                waited_s += LOOK_INTERVAL_S
                has_changed = path is not None and await self._read_again(path)
                if has_changed or waited_s >= RETRY_S:
                    waited_s = 0.0
                    await self._begin(self._targets.values())
                    await self._begin_asking(list(self._stale.values()))
                self._report()
        finally:
            self._serving.end_all()

    async def poll(self) -> NoReturn:
        """Ask the sources for newer versions every `LORA_PLUGINS_REFRESH_S`.

        Each wait is longer or shorter by up to 20 %, so that replicas do not ask at the same time.
        """
        while True:
            wait_s = self._settings.refresh_s * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret
            await asyncio.sleep(wait_s)
            await self._begin_asking(self._lifecycle.registry.all())

    async def _restore(self) -> dict[str, DesiredAdapter]:
        """Add the last server's list to the targets, or only the list's rollbacks where `LORA_PLUGINS_RESTORE` is 0.

        Returns, by name, the rollbacks of adapters that the last server's file declared: `start` compares these with
        the present file.
        """
        pieces, rolled_back, restored = self._served.pieces(), dict[str, DesiredAdapter](), dict[str, Target]()
        is_whole, places = self._settings.restore != "0", self._lifecycle.server.resolver.places
        try:
            with store_errors():
                while piece := await asyncio.to_thread(next, pieces, None):
                    for one in piece:  # several replicas' lists may have a name: the last entry counts
                        rolled_back.pop(one.name, None)
                        restored.pop(one.name, None)
                    lasting = [one for one in piece if _is_rolled_back(one, places)]
                    rolled_back |= {one.name: one for one in lasting if one.was_declared}
                    taken = [one for one in (piece if is_whole else lasting) if not one.was_declared]
                    restored |= {one.name: Target(one) for one in taken}
                    if len(restored) >= _FROZEN_FROM:  # vLLM does the same, at the end of its own start
                        gc.freeze()
        except LoRAPluginsError as error:
            if is_whole:
                raise
            # Without `LORA_PLUGINS_RESTORE`, a start must not fail because of a list that the operator does not want.
            logger.warning("Rollbacks of the last server, if any, are forgotten: %s", error)
        self._targets |= restored
        return rolled_back

    async def _ask_for_newer(self, adapter: ServedAdapter) -> None:
        """Ask the source of an adapter for a newer version.

        For a restored adapter (one in `_stale`), a source without an answer is asked again later, and a name that its
        source no longer has is unloaded: a start without the store would not have found the name.
        """
        name, registry = adapter.name, self._lifecycle.registry
        if registry.get(name) is adapter:
            await self._lifecycle.poll(name)
        if name not in self._stale:
            return
        error = None if adapter.last_error is None else adapter.last_error[0]
        # Where another caller has swapped or unloaded the adapter meanwhile, that caller has asked the source.
        is_there = registry.get(name) is adapter
        if not is_there or not isinstance(error, SourceUnavailable):
            self._stale.pop(name, None)
        if isinstance(error, AdapterNotFound) and is_there:
            background(self._unload(name, None, adapter.digest))
        if not self._stale:
            logger.info("The sources of all restored adapters have answered")

    async def _begin_asking(self, adapters: Sequence[ServedAdapter]) -> None:
        """Begin to ask for newer versions of adapters, except of names whose earlier question still waits or runs."""
        async for adapter in in_steps(adapters):
            self._asking.begin(adapter.name, adapter)

    # --- the file ---

    async def _read_again(self, path: Path) -> bool:
        """Read the file, and declare its entries if its content is new; returns whether entries were declared.

        A file with an error changes no target; `file_error` has the error.
        """
        before, self._content = self._content, None
        try:
            self._content = content = await asyncio.to_thread(read_bytes, path)
            if content == before:  # also of a content with an error: parsed once, not at each look
                return False
            entries = await asyncio.to_thread(parse_apart, content, path, self._settings.allowed_uris)
        except InvalidSettings as error:
            if str(self.file_error) != str(error):  # one event for an error, not one at each look
                self._events.emit(DeclaredFileInvalid(error))
            self.file_error = error
            return False
        self.file_error = None
        await self._declare(entries)
        return True

    async def _declare(self, entries: Mapping[str, DesiredAdapter]) -> None:
        """Note the adapters that the file declares now, and begin to unload adapters no longer declared."""
        before, targets = self._targets, dict[str, Target]()
        # Targets of the settings and of the last server's list stay, unless the file now decides over the name.
        async for name, target in in_steps(list(before.items())):
            if not (target.is_declared or name in entries):
                targets[name] = target
        async for name, adapter in in_steps(list(entries.items())):
            # An unchanged entry keeps its target, with the result so far; a new target is tried again.
            known = before.get(name)
            is_same = known is not None and known.is_declared and known.adapter == adapter
            targets[name] = known if known is not None and is_same else Target(adapter, is_declared=True)
        self._targets = targets
        async for name, target in in_steps(list(before.items())):
            if targets.get(name) is target:
                continue
            serving = self._serving.end(name)  # a load under way is of the former entry
            if name not in targets:
                background(self._unload(name, serving))

    async def _unload(self, name: str, serving: asyncio.Task[None] | None, expects: str | None = None) -> None:
        # The cancelled load must end first, or it would put the name back after the unload.
        if serving is not None:
            await asyncio.wait([serving])
        try:
            if self._lifecycle.registry.get(name) is not None:
                await self._lifecycle.unload(name, block=False, expects=expects)
        except LoRAPluginsError as error:  # another caller has unloaded or swapped the name at the same moment
            logger.debug("Adapter '%s' was not unloaded: %s", name, error)

    # --- adapters to serve ---

    async def _begin(self, targets: Iterable[Target]) -> None:
        async for target in in_steps(list(targets)):
            name = target.adapter.name
            # The file may have changed between two steps: a target that was replaced is not served.
            if self._targets.get(name) is target and not target.is_done:
                self._serving.begin(name, target)

    def _report(self) -> None:
        if (declared := self.declared) is None:
            return
        served = sum(target.is_done for target in declared.values())
        failed = sum(target.error is not None for target in declared.values())
        reconciled = DeclaredSetReconciled(len(declared), served, failed)
        if reconciled != self._reported:  # only changed counts: this runs at each look at the file
            self._reported = reconciled
            self._events.emit(reconciled)

    async def _serve(self, target: Target) -> None:
        """Try once to serve a target, and note the result in the target."""
        name = target.adapter.name
        try:
            # First from the store, where the last server has served the name.
            if not (self._is_decided(target) or await self._restored(target)):
                is_served = self._lifecycle.registry.serves(name)  # at the start, by vLLM's --lora-modules
                if not (self._is_started or is_served) and _was_served(target):
                    return  # the store has lost the version: `follow` asks the source once the server is ready
                with polling():
                    await self._make_so(target)
        except LoRAPluginsError as error:
            self._failed(target, error)
        except Exception as error:  # noqa: BLE001 - an unexpected error of one adapter must not stop the others
            logger.exception("Serving adapter '%s' failed", name)
            self._failed(target, LoRAPluginsError(f"an unexpected {type(error).__name__}", adapter=name))
        else:
            target.is_done, target.error = True, None
        if target.is_done:  # the list no longer keeps the name as one that waits to be served
            self._lifecycle.server.on_change()

    def _is_decided(self, target: Target) -> bool:
        """Whether somebody has meanwhile loaded or blocked a name that the start could not serve."""
        name, registry = target.adapter.name, self._lifecycle.registry
        is_retried = target.error is not None and not target.is_declared  # the file decides over declared names
        return is_retried and (name in registry.blocked or registry.get(name) is not None)

    async def _restored(self, target: Target) -> bool:
        """Whether the last server's version is served from the store; pins the adapter if the last server had a pin."""
        adapter = target.adapter
        # A target that stays at a fixed digest is for `_make_so`.
        served = await self._lifecycle.restore(adapter) if _was_served(target) else None
        if served is None:
            return False
        if adapter.is_pinned:
            await self._lifecycle.pin(adapter.name)
        self._stale[adapter.name] = served
        return True

    async def _make_so(self, target: Target) -> None:
        """Serve, pin or unpin an adapter as the target says; a source may be asked."""
        adapter = target.adapter
        served = self._lifecycle.registry.get(adapter.name)
        # An undeclared name that is served already stays as it is: vLLM's --lora-modules has loaded the name. A load
        # that a request has begun does not count as served, because the load may still fail.
        if served is None or served.loading is not None or target.is_declared:
            # `last_digest` of a declared adapter is the version of a rollback (see `start`).
            digest = adapter.held_digest or (adapter.last_digest if target.is_declared else None)
            served = await self._lifecycle.declare(adapter.name, adapter.uri, digest, is_noted=target.is_declared)
        if adapter.is_pinned:
            await self._lifecycle.pin(adapter.name)
        elif target.is_declared and served.is_pinned:  # the file no longer asks for the pin
            await self._lifecycle.unpin(adapter.name)
        if target.error is not None:
            logger.info("Adapter '%s' is served now", adapter.name)

    def _failed(self, target: Target, error: LoRAPluginsError) -> None:
        """Report a new error of a target; a target of the start with a permanent error is given up."""
        name, is_new = target.adapter.name, str(target.error) != str(error)
        target.error = error
        target.is_done = isinstance(error, OfAdapter) and not target.is_declared
        if is_new and target.is_declared:
            self._events.emit(NotServed("declared", name, error))
        elif is_new:
            logger.error("Adapter '%s' is not served from the start: %s", name, error)

    # --- served adapters ---

    async def _what_is_served(self) -> list[Fields]:
        """The entries of the list: served names, collected in steps; changes in between come with the next write."""
        registry, declared, served = self._lifecycle.registry, self.declared or {}, list[Fields]()
        async for name in in_steps(registry.names()):
            it = registry.get(name)
            # Without a version, only the workers have the adapter, and no server could restore it. A mixture that is
            # not pinned is made again at its next request.
            if it is None or it.version is None or (it.version.parts and not it.is_pinned):
                continue
            target, place = declared.get(name), self._lifecycle.server.resolver.place_of(it.version)
            # A digest that the file itself fixes is no rollback, and is not written.
            held = it.held_digest if target is None or target.adapter.held_digest is None else None
            # The fields of a `DesiredAdapter`, in order; the next start awaits each of them (True).
            served.append((name, it.uri, held, it.is_pinned, True, it.digest, place, target is not None))
        # Keep undeclared names that are not served yet: a restart during a source's outage must not lose these names.
        async for target in in_steps(list(self._targets.values())):
            is_open = not (target.is_done or target.is_declared or registry.serves(target.adapter.name))
            if is_open and target.adapter.name not in registry.blocked:
                served.append(astuple(target.adapter))
        return served


def _is_rolled_back(adapter: DesiredAdapter, places: Mapping[str, str]) -> bool:
    """Whether an entry of the last server's list is a rollback.

    A pushed version is none, nor is a version of a source that this server does not have in `places`, nor one from a
    URI, unless the last server's file declared the URI.
    """
    if adapter.held_digest is None or is_by_digest(adapter.name, adapter.held_digest):
        return False
    return adapter.last_place in places if adapter.uri is None else adapter.was_declared


def _was_served(target: Target) -> bool:
    """Whether the last server's list has a version for the name that was not fixed, but the newest at its source."""
    adapter = target.adapter
    return not target.is_declared and adapter.last_digest is not None and adapter.held_digest is None
