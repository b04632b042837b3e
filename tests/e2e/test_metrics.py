"""A real server's `/metrics`, compared with what was done: every number that is determined, exactly."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.reference import Reference
from testbed.server import Server
from tests.e2e.broken import BROKEN
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, lora_server

SLOTS, HOST_PLACES = 1, 3
RANKS = {spec.name: spec.rank for spec in DEMO_ADAPTERS}
WAITED = tuple(f"admission_wait_seconds_count,0,{found}" for found in ("slot", "host", "store"))
LOOK_S = 0.25
LONGEST_S = 120.0  # for what comes for certain: engines are asked once a second, and the store every five


def samples_of(server: Server) -> dict[str, float]:
    """Every sample of a scrape, by its name and label values in the order of the labels' names."""
    answer = httpx.get(f"{server.url}/metrics", timeout=LONGEST_S)
    assert answer.status_code == 200
    samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            key = ",".join((sample.name, *(value for _, value in sorted(sample.labels.items()))))
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    return samples


@dataclass
class Metered:
    """A server with its metrics, and what they were when last looked at."""

    server: Server
    client: openai.OpenAI
    bed: Bed
    root: Path
    before: dict[str, float]

    def changes(self, expected: dict[str, float], *, but: tuple[str, ...] = ()) -> dict[str, float]:
        """What has come to be as expected, with those values that are not; asserts that it does.

        What is counted too late, or too often, is seen at the next look, as each begins where the last one ended.
        """
        ends = time.monotonic() + LONGEST_S
        while True:
            now = samples_of(self.server)
            changes = self._between(self.before, now)
            others = {key: changes.pop(key, 0.0) for key in but}
            if changes == expected or time.monotonic() > ends:
                assert changes == expected
                self.before = now
                return others
            time.sleep(LOOK_S)

    def _between(self, before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
        """What of ours has changed, but for buckets, sums of seconds and times of creation."""
        return {
            key.removeprefix("lora_plugins_").replace(f",{self.bed.base}", ""): value - before.get(key, 0.0)
            for key, value in now.items()
            if key.startswith(("lora_plugins_", "vllm:lora_adapter_load_seconds", "vllm:num_", "vllm:max_gpu"))
            and not re.search(
                "store_(adapters|bytes)|_bucket|_created|_sum|_age_|requests_(running|waiting)|num_preempt", key
            )
            and value != before.get(key, 0.0)
        }

    def stores(self, adapters: int, size_bytes: int) -> None:
        """Assert that the store is shown with this size in the end."""
        ends = time.monotonic() + LONGEST_S
        while True:
            now = samples_of(self.server)
            stored = (now["lora_plugins_store_adapters"], now["lora_plugins_store_bytes"])
            if stored == (adapters, size_bytes) or time.monotonic() > ends:
                assert stored == (adapters, size_bytes)
                return
            time.sleep(LOOK_S)

    def loaded(self) -> dict[str, str]:
        """Level by adapter, as last looked at."""
        found = {}
        for key, value in self.before.items():
            if key.startswith("vllm:lora_adapter_loaded,"):
                _, adapter, engine, level, _, pinned, rank = key.split(",")
                assert (engine, pinned, rank, value) == ("0", "false", str(RANKS[adapter]), 1.0)
                found[adapter] = level
        return found

    def ask(self, name: str, status: int = 200) -> None:
        answer = complete(self.client, name, PROMPT, MAX_TOKENS)
        assert answer.status == status, answer.error
        if status == 200:
            assert list(answer.token_ids) == self.bed.answers[name]

    def ended(self, name: str, requests: int = 1) -> dict[str, float]:
        """What answers to `ask` count by adapter."""
        prompt = len(Reference(self.bed.base).prompt_ids(PROMPT))
        return {
            f"requests_total,{name}": requests,
            f"prompt_tokens_total,{name}": requests * prompt,
            f"generation_tokens_total,{name}": requests * MAX_TOKENS,
            f"time_to_first_token_seconds_count,{name}": requests,
        }

    def lines(self, name: str) -> list[str]:
        """What the log says of an adapter at INFO or above."""
        return [line for line in self.server.log().splitlines() if f"Adapter '{name}'" in line and "DEBUG" not in line]

    def stored_at(self, name: str) -> Path:
        return Path({card.id: card for card in self.client.models.list()}[name].root)


@pytest.fixture(scope="module")
def metered(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    home = tmp_path_factory.mktemp("metered")
    root = home / "adapters"
    shutil.copytree(bed.adapters, root)
    shutil.copytree(root / "sql", root / "truncated")
    next(case for case in BROKEN if case.name == "truncated").make(root / "truncated")
    arguments = ("--max-loras", str(SLOTS), "--max-cpu-loras", str(HOST_PLACES))
    with lora_server(bed, home, *arguments, plugins=(RESOLVER, MANAGER, KERNELS)) as server:
        yield Metered(server, connect(server), bed, root, {})


def fetched_bytes(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in ("adapter_config.json", "adapter_model.safetensors"))


def cold(name_bytes: int) -> dict[str, float]:
    """What the first request for an adapter that exists counts, apart from who loses what.

    Its load is asked for before it, so it may find its adapter anywhere by the time that it comes (`WAITED`).
    """
    return {
        "resolves_total,served,filesystem": 1,
        "locate_seconds_count,filesystem": 1,
        "fetch_seconds_count,filesystem": 1,
        "fetched_bytes_total,filesystem": name_bytes,
        "store_misses_total": 1,
        "instant_activations_total,0": 1,
        "vllm:lora_adapter_load_seconds_count,0": 1,
    }


def test_every_counter_changes_by_what_was_done(metered: Metered) -> None:
    """One story, as each step starts from where the last one ended."""
    # Nothing has been asked for.
    at_start = {"vllm:max_gpu_lora_adapters,0": HOST_PLACES, "host_max_adapters,0": HOST_PLACES}
    others = metered.changes(at_start, but=("store_max_bytes",))
    assert 0 < others["store_max_bytes"] < shutil.disk_usage(metered.root).total, "a share of the disk"
    assert metered.loaded() == {}
    assert any(key.startswith("vllm:request_success_total") for key in metered.before), "vLLM's own"

    # A cold adapter, and twice more.
    for _ in range(3):
        metered.ask("sql")
    expected = cold(fetched_bytes(metered.root / "sql"))
    expected |= {
        **metered.ended("sql", 3),
        "vllm:num_gpu_loaded_lora_adapters,0": 1,
        "vllm:num_cpu_loaded_lora_adapters,0": 1,
    }
    others = metered.changes(expected, but=("host_bytes,0", *WAITED))
    assert sum(others[waited] for waited in WAITED) == 3
    assert others["admission_wait_seconds_count,0,slot"] >= 2, "but for the first"
    host_bytes = others["host_bytes,0"]
    assert 0 < host_bytes <= 2 * fetched_bytes(metered.root / "sql")
    metered.stores(1, fetched_bytes(metered.root / "sql"))
    assert metered.loaded() == {"sql": "gpu"}
    (line,) = metered.lines("sql")
    for fact in (
        "filesystem",
        "file://",
        "rank 8",
        " MB",
        "located in",
        "fetched in",
        "checked in",
        "loaded in",
    ):
        assert fact in line

    # No such adapter, twice; and one that cannot be served.
    for _ in range(2):
        metered.ask("no-such-adapter", 404)
    metered.ask("truncated", 400)
    metered.changes(
        {"resolves_total,absent,none": 2, "resolves_total,refused,filesystem": 1, "errors_total,L005,resolve": 1}
    )

    # One more than there are places in host memory.
    for name in ("chat", "wide", "stable"):
        metered.ask(name)
    expected = {key: 3 * value for key, value in cold(0).items()}
    expected["fetched_bytes_total,filesystem"] = sum(
        fetched_bytes(metered.root / name) for name in ("chat", "wide", "stable")
    )
    expected |= {
        **metered.ended("chat"),
        **metered.ended("wide"),
        **metered.ended("stable"),
        "host_evictions_total,0": 1,
        "host_evicted_bytes_total,0": host_bytes,
        "vllm:num_gpu_loaded_lora_adapters,0": 2,
        "vllm:num_cpu_loaded_lora_adapters,0": 2,
    }
    others = metered.changes(expected, but=("host_bytes,0", *WAITED))
    assert sum(others[waited] for waited in WAITED) == 3
    assert metered.loaded() == {"chat": "gpu", "wide": "gpu", "stable": "gpu"}

    # The one that had to go comes back: its name is known, so it is only loaded.
    metered.ask("sql")
    expected = {
        **metered.ended("sql"),
        "admission_wait_seconds_count,0,store": 1,
        "instant_activations_total,0": 1,
        "vllm:lora_adapter_load_seconds_count,0": 1,
        "host_evictions_total,0": 1,
    }
    metered.changes(expected, but=("host_bytes,0", "host_evicted_bytes_total,0"))
    assert metered.loaded() == {"sql": "gpu", "wide": "gpu", "stable": "gpu"}
    assert len(metered.lines("sql")) == 1, "its line stands where it came first"

    # One that is where it is computed.
    metered.ask("wide")
    metered.changes({**metered.ended("wide"), "admission_wait_seconds_count,0,slot": 1})

    # One that is in no memory any more has vanished from store and source.
    stored = metered.stored_at("chat")
    stored.rename(stored.with_name("away"))  # in one step: half of it would be damaged, and fetched again
    shutil.rmtree(metered.root / "chat")
    metered.ask("chat", 404)
    expected = {
        "errors_total,L002,request": 1,
        "refused_requests_total,L002,0": 1,
        "load_failures_total,0": 1,
        "host_evictions_total,0": 1,  # a place was made free for it before it was known that it is gone
        "vllm:num_cpu_loaded_lora_adapters,0": -1,
        "vllm:num_gpu_loaded_lora_adapters,0": -1,
    }
    metered.changes(expected, but=("host_bytes,0", "host_evicted_bytes_total,0"))
    assert metered.loaded() == {"sql": "gpu", "wide": "gpu"}
