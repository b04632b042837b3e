"""A running `vllm serve` with the calls of an engine, and the forms that go through HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

from testbed.events import events
from testbed.frameworks.engines import Engine, Reading, Said
from testbed.frameworks.routes import IN_PLACE_ROUTE, OWN_TABLE_ROUTE
from testbed.frameworks.versions import PROMPT, Files

LONGEST_S = 120.0


class Served(Reading):
    """Adapters are asked for by their names; `call` posts JSON to a path."""

    def __init__(self, url: str) -> None:
        super().__init__(None)
        self._client = httpx.AsyncClient(base_url=url, timeout=LONGEST_S)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = await self._client.post(method, json=kwargs)
        result: Any = answer.status_code if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"
        self.calls.append([method, result])
        return result

    async def _read(self, name: str, lora: str, tokens: int, salt: str | None) -> Said:
        body: dict[str, Any] = {"model": lora, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
        if salt is not None:
            body["cache_salt"] = salt
        ids: list[int] = []
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    return f"{answer.status_code}: {(await answer.aread()).decode()}"
                async for chunk in events(answer):
                    if "error" in chunk:
                        return f"error: {chunk['error']}"
                    ids += chunk["choices"][0].get("token_ids") or []
                    self._begins[name].set()
        finally:
            self._begins[name].set()
        return ids


async def in_place_at_one_path(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """`/v1/load_lora_adapter`, new files at the same path, and again with `load_inplace`."""
    for version, is_loaded in (("v1", False), ("v2", True)):
        path = files.write(version)
        await engine.call("/v1/load_lora_adapter", lora_name="policy", lora_path=path, load_inplace=is_loaded)
        yield version, await engine.ask("policy")


async def in_place_in_flight(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """One name, a folder for each step, a salt for each version, and a request that runs meanwhile."""
    await engine.call(IN_PLACE_ROUTE, lora_name="prime", lora_path=files.of("v1"))
    yield "v1", await engine.ask("prime", salt="step 1")
    running = await engine.begin("prime")
    await engine.call(IN_PLACE_ROUTE, lora_name="prime", lora_path=files.of("v2"))
    yield "v2", await engine.ask("prime", salt="step 2")
    yield "running", await engine.end(running)


async def into_the_table(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """One name and one path; the prefix cache is reset before each load."""
    for version in ("v1", "v2"):
        await engine.call("/reset_prefix_cache")
        await engine.call(OWN_TABLE_ROUTE, lora_name="skyrl", lora_path=files.write(version))
        yield version, await engine.ask("skyrl")


async def a_name_for_each_step(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """`/v1/load_lora_adapter` of each step under its own name; the step before is unloaded afterwards."""
    for number, version in enumerate(("v1", "v2"), 1):
        await engine.call("/v1/load_lora_adapter", lora_name=f"art@{number}", lora_path=files.of(version))
        yield version, await engine.ask(f"art@{number}")
    await engine.call("/v1/unload_lora_adapter", lora_name="art@1")
    yield "v2", await engine.ask("art@2")
