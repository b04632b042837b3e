"""Adapters made to stop a server: refused one after the other while a healthy adapter's answer streams on."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from testbed.client import complete
from testbed.models import PROMPT, edit_config
from tests.e2e.conftest import World

WEIGHTS, CONFIG, INDEX = "adapter_model.safetensors", "adapter_config.json", "adapter_model.safetensors.index.json"
LONGEST_GAP_S = 10.0  # on a busy machine; read in the server's own process, the longest took a minute
MOST_MEMORY_BYTES = 200 << 20


def _pattern(directory: Path) -> None:
    edit_config(directory, rank_pattern={"(?:(?:(?:a+){1000}){1000}){1000}": 8})


def _many_values(directory: Path) -> None:
    config = json.loads((directory / CONFIG).read_text())
    text = json.dumps({**config, "unknown": 0})
    (directory / CONFIG).write_text(text.replace('"unknown": 0', '"unknown": [' + "[]," * 5_500_000 + "0]"))


def _long_member(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    member = '{"__metadata__": {' + ",".join(f'"{number}":"x"' for number in range(6_000_000)) + "},"
    header = member.encode() + data[9 : 8 + length]
    (directory / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def _long_index(directory: Path) -> None:
    shutil.move(directory / WEIGHTS, directory / "adapter_model-00001-of-00001.safetensors")
    with (directory / INDEX).open("wb") as file:
        file.write(b'{"weight_map": {"a": "adapter_model-00001-of-00001.safetensors"}}')
        file.truncate(1 << 30)


def _many_files(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    names = [f"adapter_model-{number:05}-of-03000.safetensors" for number in range(3000)]
    (directory / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}))
    for name in names:
        (directory / name).write_bytes(b"x")


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a-pattern": (_pattern, "counted repeats"),
    "many-values": (_many_values, "JSON of more than"),
    "a-long-member": (_long_member, "__metadata__"),
    "a-long-index": (_long_index, "an index that names no files"),
    "many-files": (_many_files, "3000 files of weights"),
}


@pytest.fixture
def hostile(world: World) -> Iterator[None]:
    for name, (spoil, _) in HOSTILE.items():
        shutil.copytree(world.bed.adapters / "sql", world.root / name)
        spoil(world.root / name)
    yield
    for name in HOSTILE:
        shutil.rmtree(world.root / name)


def test_a_healthy_stream_notices_nothing_of_hostile_adapters(world: World, hostile: None) -> None:
    server = psutil.Process(world.server.process.pid)
    complete(world.client, "sql", PROMPT, 4)
    before, most = server.memory_info().rss, 0
    stop = threading.Event()

    def longest_gap_s() -> float:
        nonlocal most
        gaps = [0.0]
        while not stop.is_set():
            chunks = world.client.completions.create(
                model="sql", prompt=PROMPT, max_tokens=200, stream=True, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            last = None
            for _ in chunks:
                now = time.monotonic()
                gaps.append(now - (last or now))
                last = now
                most = max(most, server.memory_info().rss)
        return max(gaps)

    with ThreadPoolExecutor() as threads:
        streaming = threads.submit(longest_gap_s)
        try:
            for _ in range(2):
                answers = {name: complete(world.client, name, PROMPT, 1) for name in HOSTILE}
                together = list(threads.map(lambda name: complete(world.client, name, PROMPT, 1), HOSTILE))
                for (name, (_, says)), other in zip(HOSTILE.items(), together, strict=True):
                    for answer in (answers[name], other):
                        assert answer.status == 400, (name, answer.error)
                        assert "[L005]" in answer.error
                        assert says in answer.error
        finally:
            stop.set()
        gap_s = streaming.result(timeout=240)
    assert gap_s < LONGEST_GAP_S
    assert most - before < MOST_MEMORY_BYTES
    assert server.num_threads() < 200
    assert server.num_fds() < 500
