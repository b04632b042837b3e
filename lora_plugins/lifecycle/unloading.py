"""Unload a name, block a name, and end a block: an operator's block outlives restarts, and refuses the name's requests.

Runs in the event loop of the only API server, or of the leading one, for `lifecycle.py`. A name comes in; it leaves the
table of names, and `ApiServer.drain` frees its slots, host memory and leases. A block is a file of the store
(`store/blocked_names.py`), so other servers of the store see the block too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lora_plugins.adapter.names import covering
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.lifecycle.api_server import ABORT_S, ApiServer
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.store.blocked_names import blocked
from lora_plugins.store.disk_errors import store_errors

_FREED_S = 0.02  # idle adapters are free by then; without `timeout_s`, a block waits no longer


async def free(
    server: ApiServer,
    name: str,
    refusal: LoRAPluginsError,
    timeout_s: float | None = None,
    expects: str | None = None,
    *,
    if_blocked: bool = False,
) -> bool | None:
    """Unload exactly this name, as `Lifecycle.unload` does; None where there is nothing to unload.

    With `if_blocked`, what drains of the name is ended too, and the name stays where a load under way has ended the
    name's block.
    """
    async with server.vllm.lock(name):
        if if_blocked and name not in server.registry.blocked:
            return None
        server.registry.check_version(name, expects)
        if (adapter := server.registry.remove(name)) is not None:
            server.drain(adapter)
            server.on_change()
    draining = [adapter] if adapter is not None else []
    if if_blocked:
        draining = [it for it in server.registry.draining.values() if it.name == name]
        for it in draining:
            server.retire(it.engine_id, refusal)
    timeout_s = server.drain_timeout_s if timeout_s is None else timeout_s
    ended = await asyncio.gather(*(server.end(it, refusal, timeout_s) for it in draining))
    return all(ended) if draining else None


async def block_name(server: ApiServer, name: str, timeout_s: float | None) -> bool:
    """Block a name with all its revisions, and unload what is served of it: `Lifecycle.unload` says how.

    Raises:
        SourceUnavailable, OutOfMemory: the block cannot be written, and holds in this server only.
    """
    blocks, refusal = server.registry.blocked, blocked(name)
    # Before the first await: a request that comes now must not resolve the name again.
    blocks.hold(name)
    known = [*server.registry.all(), *server.registry.draining.values()]
    known = [adapter for adapter in known if name in covering(adapter.name)]
    for adapter in known:
        server.retire(adapter.engine_id, refusal)  # also requests held, or on their way to the engine
    # The name itself too: a load under way may put it into the table while the lock is awaited.
    names = {name, *(adapter.name for adapter in known)}
    freeing = [background(free(server, one, refusal, timeout_s, if_blocked=True)) for one in names]
    with store_errors():
        await asyncio.to_thread(blocks.write, name)
    done, pending = await asyncio.wait(freeing, timeout=_FREED_S if timeout_s is None else timeout_s + ABORT_S)
    return not pending and all(task.result() is not False for task in done)


def block_to_end(server: ApiServer, name: str) -> str | None:
    """The block of exactly this name, for `ending_block`, as an operator's load is asked for; None without a block.

    Raises:
        AdapterNotFound: a block of the name without its revision holds.
    """
    server.registry.blocked.refuse(name, but_itself=True)
    return server.registry.blocked.present(name)


@asynccontextmanager
async def ending_block(server: ApiServer, name: str, seen: str | None) -> AsyncIterator[None]:
    """Inside, an operator loads exactly this name, which ends the name's block; the caller holds the name's lock.

    Raises:
        AdapterNotFound: the name was blocked meanwhile.
        SourceUnavailable: the block cannot be removed from the store.
    """
    blocks = server.registry.blocked
    present = blocks.present(name)  # None too where another load has ended the block seen
    if present not in (None, seen):
        raise blocked(name)
    if present is not None and (before := server.registry.remove(name)) is not None:
        # The block's own unload has not come yet, and the engines refuse what it retires.
        server.retire(before.engine_id, blocked(name))
        server.drain(before)
        background(server.end(before, blocked(name), server.drain_timeout_s))
    yield
    # Lift the block only after the load has succeeded, and only the block seen before the load: a block of
    # meanwhile holds. Under the name's lock, or the poller would unload the name because of the block.
    with store_errors():
        has_ended = blocks.lift(name, None) if seen is None else await asyncio.to_thread(blocks.lift, name, seen)
    if not has_ended:
        raise blocked(name)
