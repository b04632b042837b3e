"""A small adapter and a way to fetch it into a store, without any source."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.settings import Settings
from lora_plugins.store.eviction import Evictor
from lora_plugins.store.inventory import Inventory
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store, StoredAdapter
from lora_plugins.verification.protocol import ReadAdapter


def adapter_files(rank: int = 4, hidden: int = 16, seed: int = 0) -> dict[str, bytes]:
    """The two files of a valid adapter."""
    random = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": random.normal(size=(rank, hidden)).astype(np.float32),
        f"{prefix}.lora_B.weight": random.normal(size=(hidden, rank)).astype(np.float32),
    }
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}


@dataclass
class DownloadSpec:
    """A version of a source, as the store sees it."""

    files: dict[str, bytes]
    uri: str = "test://adapter"
    version: str = "v1"
    promise_sha256: bool = True
    fetches: int = 0
    before: Callable[[], None] = field(default=lambda: None)

    @property
    def promised(self) -> list[tuple[str, int, str]]:
        return [
            (name, len(data), sha256(data).hexdigest() if self.promise_sha256 else "")
            for name, data in self.files.items()
        ]

    async def fetch(self, arriving: PartialDownload) -> None:
        self.fetches += 1
        self.before()
        for name, data in self.files.items():
            (arriving.directory / name).write_bytes(data)
            arriving.landed(name, len(data))


def check(directory: Path) -> ReadAdapter:
    verified = verify_adapter(directory, None, Settings())
    return ReadAdapter(verified, canonical_bytes(verified.config))


def obtain(store: Store, wanted: DownloadSpec) -> StoredAdapter:
    return asyncio.run(store.obtain(wanted, wanted.fetch, check))


def spoil(directory: Path) -> None:
    """Change the bytes of an entry's weights, and not their number."""
    weights = directory / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"x" * weights.stat().st_size)


def is_soon(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    """Whether the condition holds before the time is over."""
    ends_at = time.monotonic() + within_s
    while not (holds := condition()) and time.monotonic() < ends_at:
        time.sleep(0.01)
    return holds


async def cancel(
    work: Coroutine[Any, Any, object], began: Awaitable[object], then: Callable[[], object] = lambda: None
) -> None:
    """Cancel what has begun, and do something before the cancelled work ends."""
    task = asyncio.create_task(work)
    await began
    task.cancel()
    await asyncio.sleep(0.01)  # the task has been told
    then()
    with pytest.raises(asyncio.CancelledError):
        await task


def leftovers(store: Store) -> list[str]:
    """What is in the folder of temporary files."""
    return [temporary.path.name for temporary in store.layout.temporaries()]


def make_room_for_one(store: Store) -> None:
    """As a fetch does where the budget is used up."""
    evictor = Evictor(store.layout, store.leases, Inventory(store.layout))
    evictor.make_room(1, evictor.inventory.look())
