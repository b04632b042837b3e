"""Goal of R46 under `kill -9`, of docs/benchmarks/index.md#pushes: `make bench-live-kills`.

kill -9 of a trainer, an API server, an engine or a worker at random moments of pushes: old or new, never neither.

    make bench-live-kills                                   # 200 trials, about an hour
    python -m benchmarks.live.kills --trials 10 --seed 7

A trainer pushes version after version of one name, and writes down which push has begun, and which was answered. A
client asks for the name all the time. In each trial a process is killed, at a moment drawn within two pushes. Each
answer must be of a version between the last that was answered as the request began and the last that had begun as the
answer ended, with PEFT's tokens for the digest that its header says. After a trainer's death nothing may fail, and
after a server's the next start (`LORA_PLUGINS_RESTORE=1`, the same store) must serve such a version at once. Nothing of
a push that was cut off may stay in the store. A server that answers nothing for 30 s after its engine's or worker's
death hangs.

Writes `benchmarks/results/live_kills.json`; 1 where anything else was
seen.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import load_file

from benchmarks.record import keep
from lora_plugins.client import CallFailed, push
from testbed.bed import MAX_TOKENS, Bed, prepare
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import ONE_THREAD, Server, end, plugged, vllm_server

NAME, KEPT, LONGEST_S = "policy", 16, 240.0
HANGS_S = 30.0  # a server that answers nothing for so long after a kill is ended, as its operator would end it
VICTIMS = {"trainer": "", **{it: rf"\({it}\w* pid=(\d+)\)" for it in ("APIServer", "EngineCore", "Worker")}}  # in logs
RIGHT = "right"


@contextlib.contextmanager
def serving(bed: Bed, home: Path) -> Iterator[Server]:
    """A server with two workers over the store in `home`, which serves again what the last one served."""
    with vllm_server(
        bed.base,
        home / f"server-{len(list(home.glob('server-*')))}.log",
        arguments=("--enable-lora", "--max-lora-rank", "64", "--max-loras", "4", "--max-cpu-loras", "16",
                   "--tensor-parallel-size", "2"),
        env={
            **plugged("lora_lru_manager,lora_kernels,lora_admin", home / "store"),
            **ONE_THREAD,
            "LORA_PLUGINS_RESTORE": "1",
            "LORA_PLUGINS_REPLICA": "only",  # each start has another port
        },
        is_forking=True,
    ) as server:  # fmt: skip
        yield server


# --- the trainer, in a process of its own ---


def train(url: str, adapters: Path, journal: Path, first: int) -> None:
    """Push versions from number `first` on, until this process or the server is killed."""
    found = [
        (load_file(adapters / spec.name / "adapter_model.safetensors"),
         json.loads((adapters / spec.name / "adapter_config.json").read_text()))
        for spec in DEMO_ADAPTERS
    ]  # fmt: skip
    with journal.open("a", buffering=1) as file:  # a line at a time
        for number in itertools.count(first):
            tensors, config = found[number % len(found)]
            file.write(f"begun {number}\n")
            try:
                push(NAME, tensors, {**config, "number": number}, servers=[url], keep=KEPT)
            except CallFailed:
                return  # the server was killed
            file.write(f"answered {number}\n")


def bounds(journal: Path) -> tuple[int, int]:
    """The last push that was answered, and the last that has begun, as the trainer has written down so far."""
    lines = journal.read_text().splitlines()
    said = [(what, int(number)) for what, _, number in (line.partition(" ") for line in lines)]
    answered, begun = ([number for what, number in said if what == which] for which in ("answered", "begun"))
    return max(answered, default=-1), max(begun, default=-1)


# --- the client ---


@dataclass
class Found:
    """How the answers of one trial were, and what must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str, *, may_be: bool = False) -> None:
        self.counts[what] += 1
        self.wrong += [] if what == RIGHT or may_be else [what]


class Versions:
    """Which push a digest is of, by the configuration that the store keeps as it was pushed."""

    def __init__(self, store: Path) -> None:
        self._store, self._numbers = store, dict[str, int]()

    def number_of(self, digest: str) -> int | None:
        if digest not in self._numbers:
            with contextlib.suppress(OSError):
                text = (self._store / digest / "adapter_config.original.json").read_text()
                self._numbers[digest] = int(json.loads(text)["number"])
        return self._numbers.get(digest)


def judged(
    number: int | None, tokens: list[int], between: tuple[int, int], expected: Callable[[int], list[int]]
) -> str:
    """What an answer is: right, of neither version, or of another version than it says."""
    if number is None:
        return "of no version that was pushed"
    if not between[0] <= number <= between[1]:
        return f"of version {number}, and not of {between[0]} to {between[1]}"
    return RIGHT if tokens == expected(number) else "other tokens than PEFT's for its digest"


def ask(url: str, versions: Versions, journal: Path, expected: Callable[[int], list[int]]) -> str:
    """Ask once; what the answer is, or which error came in its place."""
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    answered, _ = bounds(journal)
    try:
        answer = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=LONGEST_S)
    except httpx.HTTPError as error:
        return f"no answer: {type(error).__name__}"
    if answer.status_code != 200:
        return f"status {answer.status_code}: {answer.text[:200]}"
    number = versions.number_of(answer.headers.get("x-lora-digest", ""))
    return judged(number, answer.json()["choices"][0]["token_ids"], (answered, bounds(journal)[1]), expected)


def processes(server: Server, victim: str) -> list[int]:
    return sorted({int(pid) for pid in re.findall(VICTIMS[victim], server.log())})


def until(condition: Callable[[], bool], what: str, longest_s: float = LONGEST_S) -> None:
    ends_at = time.monotonic() + longest_s
    while not condition():
        if time.monotonic() > ends_at:
            raise TimeoutError(what)
        time.sleep(0.01)


def trial(server: Server, bed: Bed, home: Path, victim: str, chance: random.Random) -> tuple[dict[str, Any], Found]:
    """Kill the victim beside pushes and requests; a row, and what the answers were."""
    journal, versions, found = home / "journal.txt", Versions(home / "store"), Found()
    before, first = bounds(journal)
    ended, is_killed = threading.Event(), threading.Event()

    def ask_on() -> None:
        while not ended.is_set():
            what = ask(server.url, versions, journal, expected_of(bed))
            is_lost = what.startswith(("no answer", "status 5"))
            found.note(what, may_be=is_lost and is_killed.is_set() and victim != "trainer")

    trainer = multiprocessing.get_context("fork").Process(
        target=train, args=(server.url, bed.adapters, journal, first + 1), daemon=True
    )
    asking = threading.Thread(target=ask_on)
    trainer.start()
    try:
        began = time.monotonic()
        until(lambda: bounds(journal)[0] >= first + 2, "two pushes")
        push_s = (time.monotonic() - began) / 2
        asking.start()
        until(lambda: found.counts[RIGHT] > 0 or bool(found.wrong), "an answer")
        drawn_s = chance.uniform(0, 2 * push_s)
        time.sleep(drawn_s)
        pids = [trainer.pid] if victim == "trainer" else processes(server, victim)
        is_killed.set()
        os.kill(chance.choice(pids), signal.SIGKILL)
        trainer.join(5 if victim != "trainer" else LONGEST_S)  # a push that hangs is no trainer's fault
        after, hangs = found.counts.total() + 3, False
        if victim == "trainer":
            until(lambda: found.counts.total() >= after, "answers after the kill")
        elif victim != "APIServer":  # an API server's engine keeps the port, and nobody answers
            try:
                until(lambda: found.counts.total() >= after, "answers, or errors, after the kill", HANGS_S)
            except TimeoutError:
                hangs = True
    finally:
        ended.set()
        if victim != "trainer":
            end(server.process)
        trainer.kill()
        trainer.join()
        if asking.ident is not None:
            asking.join()
    answered, begun = bounds(journal)
    row = {"victim": victim, "pushes": answered - before, "drawn_s": round(drawn_s, 3), "is_in_push": begun > answered}
    return row | ({"hangs": True} if hangs else {}), found


def expected_of(bed: Bed) -> Callable[[int], list[int]]:
    return lambda number: bed.answers[DEMO_ADAPTERS[number % len(DEMO_ADAPTERS)].name]


def run(bed: Bed, home: Path, count: int, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    rows, wrong = [], []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(bed, home))
        for number in range(count):
            chance = random.Random(f"{seed}-{number}")
            row, found = trial(server, bed, home, chance.choice(list(VICTIMS)), chance)
            if row["victim"] != "trainer":
                stack.close()
                server = stack.enter_context(serving(bed, home))
                row["after_restart"] = ask(server.url, Versions(home / "store"), home / "journal.txt", expected_of(bed))
                found.note(row["after_restart"])
            until(lambda: not os.listdir(home / "store" / ".tmp"), "an empty folder for what arrives")
            row |= {"trial": number, "answers": dict(found.counts), "wrong": found.wrong}
            rows.append(row)
            wrong += found.wrong
            print(json.dumps(row), flush=True)
    return rows, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    bed = prepare()
    with tempfile.TemporaryDirectory(prefix="live-kills-") as folder:
        (Path(folder) / "journal.txt").touch()
        rows, wrong = run(bed, Path(folder), options.trials, options.seed)
    killed = Counter(f"{row['victim']}{', in a push' if row['is_in_push'] else ''}" for row in rows)
    print(f"{len(rows)} trials, seed {options.seed}: {dict(killed)}; neither old nor new, or wrong: {len(wrong)}")
    hangs = sum("hangs" in row for row in rows)
    print(f"servers that hung: {hangs}")
    print(f"written to {keep('live_kills', rows, seed=options.seed, killed=dict(killed), wrong=wrong, hangs=hangs)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
