"""`kill -9` at any moment leaves either nothing or the whole adapter."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, obtain

ROUNDS = 100
# For each seed that it reads it forks a process, which need not import anything again, and prints its id. That one
# fetches one version after another, in small pieces, until it is killed.
FETCHERS = """
import asyncio, os, signal, sys
from pathlib import Path
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, check
async def fetch(wanted, arriving):
    for name, data in wanted.files.items():
        with (arriving.directory / name).open("wb") as file:
            for start in range(0, len(data), 700):
                file.write(data[start:start + 700]); file.flush()
                arriving.landed(name, start + 700)
                await asyncio.sleep(0.0005)
async def fetch_all(start):
    store = Store(Path(sys.argv[1]))
    for seed in range(start, 10**9):
        wanted = DownloadSpec(adapter_files(seed=seed), version=str(seed))
        await store.obtain(wanted, lambda arriving: fetch(wanted, arriving), check)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who is killed leaves at once
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        asyncio.run(fetch_all(int(line)))
    print(pid, flush=True)
"""


def test_a_hundred_kills_leave_no_half_adapter(tmp_path: Path) -> None:
    root = tmp_path / "store"
    rng = random.Random(7)
    start = 0
    with subprocess.Popen(
        [sys.executable, "-c", FETCHERS, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as fetchers:
        for _ in range(ROUNDS // 2):
            pids = []
            for _ in range(2):
                fetchers.stdin.write(f"{start}\n")
                pids.append(int(fetchers.stdout.readline()))
            time.sleep(rng.uniform(0.0, 0.08))
            while not start and not published(root):  # at least once they come so far, on every machine
                time.sleep(0.01)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            while any(psutil.pid_exists(pid) for pid in pids):
                time.sleep(0.001)
            # Before the next start sweeps: what a reader could see at this moment.
            config = {"adapter_config.json", "adapter_config.original.json"}
            whole = config | {"adapter_model.safetensors", "manifest.json"}
            assert all(whole == names(directory) for directory in published(root))
            start += rng.randint(0, 3)
    store = Store(root)
    digests = store.layout.digests()
    assert digests
    assert all(store.verify(digest) for digest in digests)
    assert list(store.layout.folder("tmp").iterdir()) == []
    assert list(store.layout.folder("quarantine").iterdir()) == []
    # Nothing that a dead process held keeps the next one from fetching: it would wait, and then be refused.
    for seed in range(start, start + 3):
        obtain(store, DownloadSpec(adapter_files(seed=seed), version=str(seed)))


def published(root: Path) -> list[Path]:
    return [entry for entry in (root.iterdir() if root.exists() else ()) if not entry.name.startswith(".")]


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}
