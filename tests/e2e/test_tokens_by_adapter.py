"""Tokens by adapter on `/metrics` are those that the answers' `usage` says, on every way that clients ask."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import Bed
from testbed.models import PROMPT
from testbed.server import Server
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, lora_server
from tests.e2e.standing_still import LONGEST_S
from tests.e2e.test_metrics import samples_of

SETTLE_S, LOOK_S = 30.0, 0.1
PARTS = ("prompt", "generation")
Tokens = Counter[tuple[str, str]]


def counted(server: Server) -> Tokens:
    """Tokens by part and adapter."""
    found: Tokens = Counter()
    for key, value in samples_of(server).items():
        for part in PARTS:
            if key.startswith(f"lora_plugins_{part}_tokens_total,"):
                found[part, key.split(",", 1)[1]] = int(value)
    return found


def settled(server: Server, expected: Tokens) -> Tokens:
    """What is counted, once it is as expected or a time is over: an answer leaves before its end is counted."""
    ends = time.monotonic() + SETTLE_S
    while (found := counted(server)) != expected and time.monotonic() < ends:
        time.sleep(LOOK_S)
    return found


def of_usage(name: str, usage: dict[str, Any]) -> Tokens:
    return Counter({("prompt", name): usage["prompt_tokens"], ("generation", name): usage.get("completion_tokens", 0)})


BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/completions", {"prompt": PROMPT, "n": 3}),
    ("/v1/completions", {"prompt": [PROMPT, "the lazy dog"], "n": 2}),
    ("/v1/completions", {"prompt": PROMPT, "detokenize": False}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "n": 2}),
)


async def asked(url: str, name: str, path: str, body: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
    """The usage of one answer."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    sent = {"model": name, "max_tokens": 9, "temperature": 0.9, "ignore_eos": True, **body, **options}
    async with httpx.AsyncClient(base_url=url, timeout=LONGEST_S) as client:
        answer = await client.post(path, json=sent)
    assert answer.status_code == 200, answer.text
    if not streamed:
        return dict(answer.json()["usage"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith('data: {"')]
    return next(usage for line in reversed(lines) if (usage := httpx.Response(200, text=line).json().get("usage")))


async def all_asked(url: str, names: tuple[str, ...]) -> Tokens:
    """What the answers to all bodies say, asked at once for each adapter, streamed and whole."""
    ways = [(name, *body, streamed) for name in names for body in BODIES for streamed in (False, True)]
    usages = await asyncio.gather(*(asked(url, name, path, body, streamed=way) for name, path, body, way in ways))
    total: Tokens = Counter()
    for (name, *_), usage in zip(ways, usages, strict=True):
        total += of_usage(name, usage)
    return total


@pytest.fixture(scope="module")
def server(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("tokens")
    (home / "adapters").symlink_to(bed.adapters)
    template = home / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    arguments = ("--max-loras", "2", "--max-model-len", "1000", "--chat-template", str(template))
    plugins = (RESOLVER, MANAGER, KERNELS)
    with lora_server(bed, home, *arguments, plugins=plugins, LORA_PLUGINS_METRICS_ADAPTERS="all") as started:
        yield started


def test_tokens_are_those_of_the_usage_on_every_route(server: Server, bed: Bed) -> None:
    before, names = counted(server), ("sql", "team/poet")
    said = asyncio.run(all_asked(server.url, names))
    asyncio.run(asked(server.url, str(bed.base), *BODIES[0], streamed=False))  # the base model has no adapter
    assert all(said[part, name] for part in PARTS for name in names)
    assert settled(server, before + said) == before + said

    # A histogram has each request once, as `usage` has each prompt; a list of prompts is a request for each.
    prompts = 2 * sum(len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1 for _, body in BODIES)
    samples = samples_of(server)
    for name in names:
        assert samples[f"lora_plugins_time_to_first_token_seconds_count,{name}"] == prompts
        assert samples[f"lora_plugins_time_to_first_token_seconds_sum,{name}"] > 0


def test_an_aborted_answer_counts_what_its_client_could_see(server: Server, bed: Bed) -> None:
    """The client leaves at its tenth token; a few more may be made until the engine hears of it."""
    before = counted(server)
    usage = asyncio.run(asked(server.url, "sql", *BODIES[0], streamed=False))
    before = settled(server, before + of_usage("sql", usage))

    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LONGEST_S) as answer:
        assert answer.status_code == 200, answer.read()
        seen = sum(line.startswith("data: {") for line, _ in zip(answer.iter_lines(), range(20), strict=False))
    ends = time.monotonic() + SETTLE_S
    while (found := counted(server)) == before and time.monotonic() < ends:
        time.sleep(LOOK_S)
    assert found["prompt", "sql"] - before["prompt", "sql"] == usage["prompt_tokens"]
    assert seen <= found["generation", "sql"] - before["generation", "sql"] < 900
    time.sleep(1.0)
    assert counted(server) == found, "once"


def test_a_refused_request_counts_nothing(server: Server) -> None:
    before = counted(server)
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 100_000}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=LONGEST_S).status_code == 400
    time.sleep(0.5)
    assert counted(server) == before


@pytest.mark.nightly
def test_each_scrape_of_two_api_servers_has_all_tokens(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "adapters").symlink_to(bed.adapters)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "names.txt").write_text("sql\n")
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    arguments = ("--max-loras", "2", "--chat-template", str(template), "--api-server-count", "2")
    env = {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"),
        "LORA_PLUGINS_METRICS_ADAPTERS": str(tmp_path / "names.txt"),
    }
    with lora_server(bed, tmp_path, *arguments, plugins=(RESOLVER, MANAGER, KERNELS), **env) as server:
        said = asyncio.run(all_asked(server.url, ("sql", "chat")))
        expected: Tokens = Counter({(part, "sql"): said[part, "sql"] for part in PARTS})
        expected |= Counter({(part, "_other"): said[part, "chat"] for part in PARTS})
        assert settled(server, expected) == expected
        assert [counted(server) for _ in range(8)] == [expected] * 8, "whichever server answers"
