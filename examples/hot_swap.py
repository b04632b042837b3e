"""A new version of an adapter replaces the old one while requests for it run."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import OpenAI

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import PROMPT
from testbed.server import Server

CLIENTS = 3
RUN_S = 1.0  # before and after the swap


@dataclass(frozen=True)
class Swap:
    """What the clients saw: answers by what they equal (`old`, `new`, `neither`, `refused`), and the swap's seconds."""

    answers: Counter[str]
    swap_s: float
    message: str
    after: bool

    @property
    def right(self) -> bool:
        return set(self.answers) == {"old", "new"} and self.after


def swap(server: Server, bed: Bed, root: Path, name: str, new: str) -> Swap:
    """Publish `new`'s weights as the next version of `name`, and swap to it while clients ask for it."""
    kinds = {tuple(bed.answers[name]): "old", tuple(bed.answers[new]): "new"}
    answers: list[str] = []
    done = threading.Event()

    def ask(client: OpenAI) -> str:
        answer = complete(client, name, PROMPT, MAX_TOKENS)
        return kinds.get(answer.token_ids, "neither") if answer.status == 200 else "refused"

    def traffic() -> None:
        client = connect(server)
        while not done.is_set():
            answers.append(ask(client))

    clients = [threading.Thread(target=traffic) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(RUN_S)
    _publish(bed.adapters / new, root / name)
    started = time.perf_counter()
    status = httpx.post(f"{server.url}/v1/loras/{name}/refresh", timeout=60).raise_for_status().json()
    swap_s = time.perf_counter() - started
    after = ask(connect(server)) == "new"
    time.sleep(RUN_S)
    done.set()
    for client in clients:
        client.join()
    return Swap(Counter(answers), swap_s, status["message"], after)


def _publish(adapter: Path, target: Path) -> None:
    """As a trainer does: complete, by renaming."""
    fresh, old = (target.with_name(f"{target.name}.{what}") for what in ("fresh", "old"))
    shutil.copytree(adapter, fresh)
    target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old)
