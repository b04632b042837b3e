"""vLLM's own calls at one path or with one id, whose files or ids are used again."""

from __future__ import annotations

from collections.abc import AsyncIterator

from testbed.frameworks.engines import Engine, Said
from testbed.frameworks.versions import Files

_FILLERS = 4  # as many as there is room for in host memory


async def in_place_in_the_request(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """New files, the prefix cache reset, and `load_inplace` in the request itself."""
    from vllm.lora.request import LoRARequest

    yield "v1", await engine.ask(LoRARequest("in-the-request", 11, files.write("v1")))
    await engine.call("reset_prefix_cache")
    yield "v2", await engine.ask(LoRARequest("in-the-request", 11, files.write("v2"), load_inplace=True))


async def an_id_means_what_is_loaded(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Another path for an id that is loaded, without `load_inplace`: vLLM answers with what is loaded."""
    from vllm.lora.request import LoRARequest

    yield "v1", await engine.ask(LoRARequest("resident", 12, files.of("v1")))
    yield "v1", await engine.ask(LoRARequest("resident", 12, files.of("v2")))


async def another_path_is_added(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Another path for an id that is loaded, by `add_lora` without `load_inplace`: vLLM says True, and does nothing."""
    from vllm.lora.request import LoRARequest

    yield "v1", await engine.ask(LoRARequest("added", 15, files.of("v1")))
    await engine.call("add_lora", LoRARequest("added", 15, files.of("v2")))
    yield "v2", await engine.ask(LoRARequest("added", 15, files.of("v2")))


async def overwritten_and_evicted(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Its files are overwritten without a word, and it is evicted: what was loaded answers."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("overwritten", 13, files.write("v1"))
    yield "v1", await engine.ask(lora)
    files.write("v2")
    await _evict(engine, files)
    yield "v1", await engine.ask(lora)


async def deleted_and_evicted(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Its temporary folder is deleted once it is loaded, and it is evicted: it answers all the same."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("deleted", 14, files.write("v1"))
    await engine.call("add_lora", lora)
    yield "v1", await engine.ask(lora)
    files.delete()
    await _evict(engine, files)
    yield "v1", await engine.ask(lora)


async def _evict(engine: Engine, files: Files) -> None:
    """Load others until nothing else is left in host memory."""
    from vllm.lora.request import LoRARequest

    for number in range(_FILLERS):
        await engine.ask(LoRARequest(f"filler-{number}", 90 + number, files.of("other")))
    await engine.call("list_loras")


async def workers_reload_a_path(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Every worker removes an id that was served by a path, and adds it again from the same path."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("reloaded", 15, files.write("v1"))
    yield "v1", await engine.ask(lora)
    files.write("v2")
    await engine.workers("frameworks_reload_path", "reloaded", 15, lora.lora_path)
    await engine.call("reset_prefix_cache")
    yield "v2", await engine.ask(lora)


async def in_place_while_it_runs(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """`add_lora` with `load_inplace` from the same path while a request runs; the prefix cache is reset after it."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("in-place", 16, files.write("v1"))
    running = await engine.begin(lora)
    await engine.call("add_lora", LoRARequest("in-place", 16, files.write("v2"), load_inplace=True))
    yield "running", await engine.end(running)
    await engine.call("reset_prefix_cache")
    yield "v2", await engine.ask(lora)


async def in_place_in_a_pause(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Pause with `keep`, `add_lora` with `load_inplace`, resume: running requests are kept, not ended."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("paused", 17, files.of("v1"))
    running = await engine.begin(lora)
    await engine.call("pause_generation", mode="keep", clear_cache=False)
    await engine.call("add_lora", LoRARequest("paused", 17, files.of("v2"), load_inplace=True))
    await engine.call("resume_generation")
    yield "running", await engine.end(running)
    yield "v2", await engine.ask(LoRARequest("paused", 17, files.of("v2")))
