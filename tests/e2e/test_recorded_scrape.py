"""What a router sees of a real server with adapters in slots, in host memory and pinned, while requests are held.

The page is `tests/observability/recorded/metrics.txt`; `RENEW_GOLDEN=1` records it again.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import PROMPT
from tests.e2e.admin import HEADERS
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S
from tests.observability.recorded_scrape import PAGE, lora_shape, samples
from tests.observability.strict_page import check_page

RUNS, RUNNING, WAITS, WAITING = "stable", 4, "chat", 3
ATTEMPTS = 10  # on a machine that stands still for seconds, requests may be over before they are looked at


def test_a_routers_view_is_as_it_is_recorded(bed: Bed, tmp_path: Path) -> None:
    shutil.copytree(bed.adapters, tmp_path / "adapters")
    arguments = ("--max-loras", "2", "--served-model-name", "llama")
    with admin_server(bed, tmp_path, *arguments, LORA_PLUGINS_KERNELS="reference") as server:
        answer = complete(connect(server), "sql", PROMPT, MAX_TOKENS)
        assert list(answer.token_ids) == bed.answers["sql"], answer.error
        assert httpx.post(f"{server.url}/v1/loras/sql/pin", headers=HEADERS, timeout=LONGEST_S).status_code == 200
        page = asyncio.run(while_requests_are_held(server.url, bed))
    check_page(page)
    if os.environ.get("RENEW_GOLDEN"):
        PAGE.write_text(page)
    assert lora_shape(page) == lora_shape(PAGE.read_text())
    assert places(page) == places(PAGE.read_text())
    waiting = [labels["waiting_lora_adapters"].split(",") for labels, _ in samples(page, "vllm:lora_requests_info")]
    assert any({RUNS, WAITS} & set(names) for names in waiting), "to a router this replica must not look idle"


def places(page: str) -> set[tuple[str, ...]]:
    """Where each adapter is, without the engine, the model and the value."""
    told = ("adapter_name", "level", "pinned", "rank")
    return {tuple(labels[key] for key in told) for labels, _ in samples(page, "vllm:lora_adapter_loaded")}


async def while_requests_are_held(url: str, bed: Bed) -> str:
    """The page while some requests run and others wait for a slot, as vLLM's own metrics and ours say."""
    async with httpx.AsyncClient(base_url=url, timeout=LONGEST_S) as client:

        def ask(name: str, tokens: int) -> asyncio.Task[httpx.Response]:
            body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            return asyncio.create_task(client.post("/v1/completions", json=body | {"return_token_ids": True}))

        async def page_when(is_seen: Callable[[str], bool], running: list[asyncio.Task[httpx.Response]]) -> str:
            """The first page on which it is seen; empty if the requests have ended before."""
            async with asyncio.timeout(LONGEST_S):
                while not any(task.done() for task in running):
                    page = (await client.get("/metrics")).text
                    if is_seen(page):
                        return page
                    await asyncio.sleep(0.01)
            return ""

        def all_run(page: str) -> bool:
            return shown(page, "vllm:num_requests_running") == RUNNING

        def all_wait(page: str) -> bool:
            return {shown(page, name) for name in ("vllm:num_requests_waiting", "lora_plugins_held")} == {WAITING}

        async def is_right(name: str, *asked: asyncio.Task[httpx.Response]) -> None:
            for answer in await asyncio.gather(*asked):
                assert answer.json()["choices"][0]["token_ids"] == bed.answers[name]

        async def attempt() -> str:
            for name in (WAITS, "team/poet", RUNS):  # in host memory, and in the slot beside the pinned one's
                await is_right(name, ask(name, MAX_TOKENS))
            running = [ask(RUNS, 900) for _ in range(RUNNING)]
            held: list[asyncio.Task[httpx.Response]] = []
            page = await page_when(all_run, running)
            if page:
                held = [ask(WAITS, MAX_TOKENS) for _ in range(WAITING)]
                page = await page_when(all_wait, running)
            for task in running:
                task.cancel()
            await is_right(WAITS, *held)
            return page

        for _ in range(ATTEMPTS):
            if page := await attempt():
                return page
        raise AssertionError(f"in {ATTEMPTS} attempts {RUNNING} requests were over before {WAITING} were seen to wait")


def shown(page: str, gauge: str) -> float:
    """The one value of a gauge: parsing the whole page takes longer than there is time."""
    (value,) = re.findall(rf"^{gauge}\{{.*\}} (\S+)$", page, re.MULTILINE)
    return float(value)
