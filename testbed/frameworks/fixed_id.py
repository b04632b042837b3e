"""Servers that have one adapter at a time, under an id that they use again: by removing it, or past its path."""

from __future__ import annotations

from collections.abc import AsyncIterator

from vllm.lora.request import LoRARequest

from testbed.frameworks.engines import Engine, Said
from testbed.frameworks.versions import Files

STUB_PATH = "/stub_path"


async def removed_and_added(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """`remove_lora`, which may find nothing, `add_lora` from the step's folder, and a request for another adapter."""
    for version in ("v1", "v2"):
        await engine.call("remove_lora", 31)
        lora = LoRARequest("policy", 31, files.of(version))
        await engine.call("add_lora", lora)
        await engine.ask(LoRARequest("between", 32, files.of("other")))
        yield version, await engine.ask(lora)


async def stub_path(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """`add_lora` with the real path under a new id; requests name that id and a path that is not there."""
    for number, version in enumerate(("v1", "v2"), 41):
        await engine.call("add_lora", LoRARequest(str(number), number, files.write(version)))
        await engine.call("list_loras")
        yield version, await engine.ask(LoRARequest(str(number), number, STUB_PATH))


async def in_place_at_one_path(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """The prefix cache is reset, new files are at the same path, `add_lora` with `load_inplace`."""
    for version in ("v1", "v2"):
        await engine.call("reset_prefix_cache", reset_running_requests=True)
        await engine.call("add_lora", LoRARequest("skyrl", 43, files.write(version), load_inplace=True))
        yield version, await engine.ask(LoRARequest("skyrl", 43, files.write(version)))


async def in_place_with_its_cache(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """The same, the prefix cache left as it is."""
    for version in ("v1", "v2"):
        await engine.call("add_lora", LoRARequest("skyrl-async", 44, files.write(version), load_inplace=True))
        yield version, await engine.ask(LoRARequest("skyrl-async", 44, files.write(version)))
