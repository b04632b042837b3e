"""Pause one name: its running requests end or stop, new requests are held, and every other name runs on.

A pause is of a request's name, so the pause outlives every swap of the name; an unload of the name ends the pause, and
so does the end of the server. A version asked for by digest, `name@digest`, is a name of its own.
"""

from __future__ import annotations

from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.server.api_server import ApiServer


async def pause(server: ApiServer, name: str, mode: PauseMode) -> bool:
    """Hold new requests for a name, and return once none runs; False where a resume came meanwhile.

    Raises:
        AdapterNotFound: the name is blocked, or not served.
    """
    server.registry.require(name)
    # Before the engines know: a resume that comes during the calls below takes the name out again, and the last line
    # sees the resume.
    server.registry.paused.add(name)
    requests = await server.planner.pause(name, mode)
    if mode is PauseMode.ABORT:
        await server.vllm.abort(list(requests.request_ids))
    await server.planner.paused(name, requests.clients)
    return name in server.registry.paused


async def resume(server: ApiServer, name: str) -> bool:
    """Let held requests for a name go on; False where the name was not paused.

    Raises:
        AdapterNotFound: the name is neither paused nor served.
    """
    if name not in server.registry.paused:
        server.registry.require(name)
        return False
    server.registry.paused.discard(name)
    await server.planner.resume(name)
    return True
