"""Find a version to serve, by name, place or digest, and swap a served name to it, and back, while requests run.

A name points to a version through vLLM's table of names. A new version gets an engine id of its own, is loaded beside
the old version, and replaces the old version in the table in one step: running requests go on with the old version, and
every later request gets the new version. When the last request of the old version has left, engines remove the old
version from slots and host memory. Requests of the new version never match cached prefixes of the old, because vLLM's
cache keys hold the adapter's path (0.30: see lora_request.py).

A change in flight (`moves`) is the same, and then one more call: running requests of the old version go on with the new
version, and so do requests that took the old version from the table before. A load that fails changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from lora_plugins.adapter.names import why_absent
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.events import AdapterSwapped, NotServed
from lora_plugins.lifecycle.api_server import ApiServer
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.lifecycle.registry import ServedAdapter, gone_from_source
from lora_plugins.resolvers.known_versions import ResolvedAdapter
from lora_plugins.resolvers.sources.uri import is_by_path, is_from

KEPT_VERSIONS = 2


class ChangeReason(Enum):
    """Why a name serves another version than before a call, or the same version."""

    LOADED = auto()
    """The name was not served before."""
    SWAPPED = auto()
    """The name was served in another version, or from another path."""
    REPAIRED = auto()
    """The store's copy was damaged: the engines have loaded the same version again, from a sound copy."""
    UNCHANGED = auto()
    """The version was served already."""


@dataclass(frozen=True, slots=True)
class VersionChange:
    """Digests of a name before and after a call; None where the name is not served, or only workers have it."""

    before: str | None
    after: str | None
    reason: ChangeReason

    @property
    def is_swap(self) -> bool:
        """Whether the engines have loaded weights in the place of the weights that were served before."""
        return self.reason in (ChangeReason.SWAPPED, ChangeReason.REPAIRED)


async def change(
    server: ApiServer,
    adapter: ServedAdapter,
    version: ResolvedAdapter | None,
    uri: str | None,
    held_digest: str | None,
    *,
    path: str = "",
    moves: bool = False,
    pins: bool = False,
    kept_versions: int = KEPT_VERSIONS,
    is_noted: bool = False,
) -> VersionChange:
    """Have new requests for a name enter the engine with `version`, leased for the name; with the name's lock.

    Without a version, with the files that workers find at `path`. `uri` and `held_digest` become those of `adapter`,
    which may be new. With `moves`, running requests go on with the new version too, from one step on. `pins`: another
    version than the served one is pinned. The version served already is loaded again only where its copy was damaged.
    `kept_versions` of the earlier versions stay. `is_noted`: as in `PlannerClient.load`.

    Raises:
        LoRAPluginsError: the version cannot be loaded; the old version goes on, and the lease has ended.
    """
    started, old, before = time.perf_counter(), adapter.request, adapter.digest
    reason = ChangeReason.LOADED if old is None else ChangeReason.SWAPPED
    moves, pins, old_words = moves and old is not None, pins or adapter.is_pinned, _in_words(adapter)
    leased = [] if version is None else [version]
    if version is not None:
        # Of a damaged copy that is sound again, written to and back, engines may have read what was between.
        path = await server.engine_path(adapter.name, version, other_than=old.lora_path if adapter.is_damaged else "")
        if before == version.digest and old.lora_path == path:
            _note_found(server, adapter, version, uri, held_digest)
            return VersionChange(before, before, ChangeReason.UNCHANGED)
        reason = ChangeReason.REPAIRED if before == version.digest else reason
    request = server.vllm.new_request(adapter.name, path, adapter.base_name)
    succeeds = old.lora_int_id if moves else None
    try:
        await server.planner.load(request, uri=uri, wants_slot=old is None, succeeds=succeeds, is_noted=is_noted)
        if pins and not (moves and adapter.is_pinned):  # a move takes the pin along
            await server.planner.pin(request, uri=uri)
    except BaseException:
        server.retire(request.lora_int_id)
        server.release(adapter.name, *leased)
        raise
    # After a swap back to an earlier version the list has the version no longer: the end of the one lease would end the
    # other.
    previous = [kept for kept in adapter.versions if version is None or kept.digest != version.digest]
    adapter.request, adapter.version, adapter.last_error = request, version, None
    adapter.previous, adapter.is_only_copy, adapter.is_damaged = previous[:kept_versions], False, False
    adapter.uri, adapter.held_digest, adapter.is_pinned, adapter.loading = uri, held_digest, pins, None
    # No await between here and the assignments above: no request sees half a swap.
    server.registry.put(adapter)
    if old is not None:
        # The new version inherits the time of use: a swap must not make an unused adapter look recently used, or
        # unused.
        used_at = server.planner.used_at.get(old.lora_int_id)
        if used_at is not None:
            server.planner.used_at[adapter.engine_id] = used_at
        server.release(adapter.name, *previous[kept_versions:])
        if moves:
            moving = background(server.planner.move(request.lora_int_id))
        else:
            server.retire(old.lora_int_id)
        server.events.emit(AdapterSwapped(adapter.name, old_words, _in_words(adapter), time.perf_counter() - started))
    server.on_change()
    if moves:
        await asyncio.shield(moving)  # the change has been made, even if the caller leaves
    return VersionChange(before, adapter.digest, reason)


def _note_found(
    server: ApiServer, adapter: ServedAdapter, version: ResolvedAdapter | None, uri: str | None, held_digest: str | None
) -> None:
    """Note where the version served already was found, and whether it is fixed now."""
    is_written = (adapter.version, adapter.uri, adapter.held_digest) == (version, uri, held_digest)
    adapter.version, adapter.last_error, adapter.is_only_copy, adapter.is_damaged = version, None, False, False
    adapter.uri, adapter.held_digest = uri, held_digest
    if not is_written:
        server.on_change()


@contextmanager
def updating(server: ApiServer, adapter: ServedAdapter) -> Iterator[None]:
    """Inside, calls that are `is_noted` update an adapter; a failure is noted, and the old version goes on."""
    try:
        yield
    except LoRAPluginsError as error:
        if adapter.is_served:
            adapter.failed(error)
            server.events.emit(NotServed("update", adapter.name, error))
        raise


def _in_words(adapter: ServedAdapter) -> str:
    return adapter.digest or str(getattr(adapter.request, "lora_path", ""))


async def find(server: ApiServer, name: str, uri: str | None) -> ResolvedAdapter:
    """The version at `uri`, or wherever the server's sources have the name; leased for the name.

    Raises:
        AdapterNotFound: no source has the adapter. LoRAPluginsError: the adapter cannot be served.
    """
    found = (await server.resolver.look_up(name, server.vllm.base_path, uri)).version()
    if found is None:
        raise why_absent(name) or AdapterNotFound(
            "no such adapter at any source",
            expected="one that a source of this server has",
            remedy="correct its name, or say where it is with source.uri",
            adapter=name,
        )
    return found


async def find_newest(server: ApiServer, name: str, uri: str | None) -> ResolvedAdapter:
    """Find as `find` does, for a name served before, whose place may be the path of one of vLLM's own calls.

    Raises:
        AdapterNotFound: the source has the adapter no more. LoRAPluginsError: the adapter cannot be served.
    """
    newest = await server.resolver.latest(name, uri, server.vllm.base_path)
    if newest is None:
        raise gone_from_source(name)
    return newest


async def find_version(server: ApiServer, name: str, uri: str | None, digest: str | None) -> ResolvedAdapter:
    """Find as `find` does, in the version of `digest` if given: from the store, or from the place.

    Raises:
        AdapterNotFound: neither has the version. LoRAPluginsError: the version cannot be served.
    """
    if digest is None:
        return await find(server, name, uri)
    # All 64 characters prove that the caller knows the version, so another name's copy counts too.
    kept = await server.resolver.of_digest(name, digest, of_any_name=True)
    if kept is not None:
        if uri is None or is_by_path(uri) or is_from(kept.uri, uri):
            return kept
        server.release(name, kept)  # the same bytes from another place
    found = await (find_newest if is_by_path(uri) else find)(server, name, uri)
    if found.digest != digest:
        server.release(name, found)
        raise AdapterNotFound(
            f"the version {found.digest[:12]} at its source",
            expected=f"{digest}, which the store does not have from there",
            remedy="put that version there, or declare another digest",
            adapter=name,
        )
    return found
