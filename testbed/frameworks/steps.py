"""A folder for each step of training: under the same id while requests run, or each under a name of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

from vllm.lora.request import LoRARequest

from testbed.frameworks.engines import Engine, Said
from testbed.frameworks.versions import Files


async def same_id_in_flight(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """`add_lora` with `load_inplace`, the same name and id, the next step's folder, while a request runs.

    Each version has a salt of its own for the prefix cache.
    """
    first = LoRARequest("prime", 51, files.of("v1"))
    yield "v1", await engine.ask(first, salt="step 1")
    running = await engine.begin(first)
    await engine.call("add_lora", LoRARequest("prime", 51, files.of("v2"), load_inplace=True))
    yield "v2", await engine.ask(LoRARequest("prime", 51, files.of("v2")), salt="step 2")
    yield "running", await engine.end(running)


async def a_name_for_each_step(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """`add_lora` of a new name, id and folder between pause and resume; the old step stays loaded."""
    for number, version in enumerate(("v1", "v2"), 61):
        await engine.call("pause_generation")
        lora = LoRARequest(f"art@{number}", number, files.of(version))
        await engine.call("add_lora", lora)
        await engine.call("resume_generation")
        yield version, await engine.ask(lora)
    yield "v1", await engine.ask(LoRARequest("art@61", 61, files.of("v1")))
