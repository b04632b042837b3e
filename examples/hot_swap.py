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

from examples.demo_models import DemoModel
from testbed.client import Answer, connect
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


def swap(server: Server, model: DemoModel, root: Path) -> Swap:
    """Publish another adapter's weights as the next version of a name, and swap to it while clients ask for it."""
    name, new = model.swapped
    answers: list[Answer] = []
    done = threading.Event()

    def ask(client: OpenAI) -> Answer:
        return model.ask(client, name, lambda text: None)

    def traffic() -> None:
        client = connect(server)
        while not done.is_set():
            answers.append(ask(client))

    clients = [threading.Thread(target=traffic) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    wait_for_answers(answers, CLIENTS)
    publish(model.root / new, root / name)
    started = time.perf_counter()
    status = httpx.post(f"{server.url}/v1/loras/{name}/refresh", timeout=60).raise_for_status().json()
    swap_s = time.perf_counter() - started
    after = ask(connect(server))
    time.sleep(RUN_S)
    done.set()
    for client in clients:
        client.join()

    def kind(answer: Answer) -> str:
        versions = (("old", name), ("new", new))
        whose = [label for label, adapter in versions if model.is_right(model.root / adapter, answer)]
        return (whose or ["neither"])[0] if answer.status == 200 else "refused"

    return Swap(Counter(map(kind, answers)), swap_s, status["message"], kind(after) == "new")


def wait_for_answers(answers: list[Answer], number: int) -> None:
    time.sleep(RUN_S)
    while len(answers) < number:
        time.sleep(0.05)


def publish(adapter: Path, target: Path) -> None:
    """As a trainer does: complete, by renaming."""
    fresh, old = (target.with_name(f"{target.name}.{what}") for what in ("fresh", "old"))
    shutil.copytree(adapter, fresh)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)
