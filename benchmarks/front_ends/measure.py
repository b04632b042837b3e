"""Figures of docs/benchmarks/index.md#several-api-servers, for R56 and R68: `make bench-front-ends`.

Several API servers under load: `make bench-front-ends`.

    python -m benchmarks.front_ends.measure --case swaps --swaps 100 --requests 2000

All callers are in processes of their own; a connection is closed after 20 answers, so that
all API servers get some.

- swaps: one name is swapped while it is asked for, over four API servers and two engines. Each answer must be PEFT's
  for the digest in its header, and none that was begun after a swap was answered may be of an earlier version.
- kills: every `--kill-every-s` seconds one of four API servers is killed, just after an administrator's call was
  answered. What fails meanwhile; after the death of the first, with which all end, whether the server that is started
  again has forgotten anything. vLLM alone beside.
- throughput: answers per second of the base model, of hot adapters, and of the same adapters in vLLM without plugins
  (`--lora-modules`), of one API server and of four, in turn.

Keeps benchmarks/results/front_ends.json, or front_ends_swaps.json and the like of some cases; returns 1 where a count
that must be 0 is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.front_ends.caller import GREEDY, Answer, Caller
from benchmarks.front_ends.server import COUNT, END_S, api_servers, serving
from benchmarks.record import keep
from lora_plugins.client import push
from testbed.bed import MAX_TOKENS, Bed, prepare
from testbed.models import PROMPT, edit_config
from testbed.server import Server

ENGINES, NAME = 2, "policy"
CASES = ("swaps", "kills", "throughput")
ALONE = {"VLLM_PLUGINS": "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}  # which vLLM refuses for several API servers
QUIET_S = 2.0  # the threads of an engine that has just computed spin for a while, and would slow the next
KINDS = ("base", "hot", "vLLM alone hot")  # of what throughput asks for


def originals_of(bed: Bed) -> list[str]:
    return [name for name in bed.answers if name is not None]


def telling_tokens(bed: Bed) -> int:
    """How many tokens tell the answers of all adapters and of the base model apart."""
    for count in range(1, MAX_TOKENS + 1):
        if len({tuple(ids[:count]) for ids in bed.answers.values()}) == len(bed.answers):
            return count
    raise AssertionError("two adapters give the same answer")


# --- swaps ---

Version = tuple[str, str, float]  # digest, original, when the push was answered


def judged(
    answers: Iterable[Answer], made: Sequence[Version], right: Mapping[str | None, list[int]]
) -> tuple[Counter[str], list[float]]:
    """Count answers by what they are; and how long after the next version's swap old ones were begun."""
    number = {digest: at for at, (digest, _, _) in enumerate(made)}
    found, stale_s = Counter[str](), list[float]()
    for answer in answers:
        at = number.get(answer.digest, -1)
        is_right = at >= 0 and answer.ids == right[made[at][1]]
        found["not answered" if answer.status != 200 else "right" if is_right else "of another version"] += 1
        if 0 <= at < len(made) - 1 and answer.began_at > made[at + 1][2]:
            found["begun after a swap, and old"] += 1
            stale_s.append(answer.began_at - made[at + 1][2])
    return found, stale_s


def swaps(bed: Bed, home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Swap a name while it is asked for: a push after each `requests / swaps` answers."""
    originals, tokens = originals_of(bed), telling_tokens(bed)
    made: list[Version] = []

    def swap(url: str) -> None:
        original = originals[len(made) % len(originals)]
        directory = home / "pushed"
        directory.mkdir(parents=True, exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (directory / file).write_bytes((bed.adapters / original / file).read_bytes())
        edit_config(directory, revision=str(len(made)))
        digest = push(NAME, directory, servers=[url]).digest
        made.append((digest, original, time.monotonic()))

    with serving(bed, home, "--data-parallel-size", str(ENGINES)) as server:
        swap(server.url)
        every = options.requests // options.swaps
        began = time.monotonic()
        with Caller(server.url, [NAME], tokens, options.at_once, say_every=every) as caller:
            for _ in range(options.swaps):
                caller.wait_for_word()
                swap(server.url)
        took_s = time.monotonic() - began
    found, stale_s = judged(caller.answers, made, {name: ids[:tokens] for name, ids in bed.answers.items()})
    return {
        "swaps": len(made) - 1,
        "tokens": tokens,
        "took_s": round(took_s, 1),
        "found": dict(found),
        "largest_stale_s": max(stale_s, default=0.0),
        "client_core": caller.core,
        "by_server": sorted(Counter(it.server for it in caller.answers if it.server).values()),
    }


# --- kills ---


def kills(bed: Bed, home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kill one API server after the other, and start again what ended with the first."""
    chance, lives, expected = random.Random(options.seed), list[dict[str, Any]](), dict[str, tuple[str, str, bool]]()
    originals, ends_at = originals_of(bed), time.monotonic() + options.kill_for_s
    served, digests = originals[:-1], dict[str, str]()  # one is blocked; originals by digest

    def pushed(server: Server, name: str, original: str) -> str:
        digest = push(name, bed.adapters / original, servers=[server.url]).digest
        digests[digest] = original
        return digest

    def change(server: Server, number: int) -> str:
        """Change something; returns what, once that is answered."""
        if (kind := chance.choice(("push", "rollback", "pin"))) == "pin":
            digest, original, is_pinned = expected[name := served[0]]
            done(server, "POST", f"/v1/loras/{name}/{'unpin' if is_pinned else 'pin'}")
            expected[name] = (digest, original, not is_pinned)
            return kind
        name = served[1 + number % (len(served) - 1)]
        digest = pushed(server, name, chance.choice([it for it in served if it != expected[name][1]]))
        if kind == "rollback":
            digest = done(server, "POST", f"/v1/loras/{name}/rollback")["digest"]
        expected[name] = (digest, digests[digest], False)
        return kind

    while time.monotonic() < ends_at or not lives:
        with serving(bed, home, LORA_PLUGINS_RESTORE="1") as server:
            forgotten = missing(server, bed, expected)
            if not lives:
                expected |= {name: (pushed(server, name, name), name, name == served[0]) for name in served}
                done(server, "POST", f"/v1/loras/{served[0]}/pin")
                pushed(server, originals[-1], originals[-1])
                done(server, "DELETE", f"/v1/loras/{originals[-1]}?block=true")
                expected[originals[-1]] = ("", "blocked", False)
            living, deaths, changes = api_servers(server), dict[str, float](), list[str]()
            first = living[0]
            with Caller(server.url, served, MAX_TOKENS, options.at_once) as caller:
                while first in living:
                    time.sleep(options.kill_every_s)
                    # Answered just before.
                    changes.append(change(server, sum(len(life["changes"]) for life in lives) + len(changes)))
                    living.remove(killed := chance.choice(living))
                    deaths[str(killed)] = killed_at = time.monotonic()
                    os.kill(killed, signal.SIGKILL)
                server.process.wait(END_S)
                ended_s = time.monotonic() - killed_at
            failed = Counter(
                "of the killed" if it.server in deaths or _is_cut(it, deaths.values()) else "of others"
                for it in caller.answers
                if it.status != 200 and it.began_at + it.took_s < killed_at
            )
            answered = [it for it in caller.answers if it.status == 200]
            wrong = sum(it.ids != bed.answers.get(digests.get(it.digest, "")) for it in answered)
            lives.append({"forgotten": forgotten, "changes": changes, "outlived": len(deaths) - 1,
                          "ended_s": round(ended_s, 2), "exit_code": server.process.returncode,
                          "answers": len(answered), "wrong": wrong, "failed": dict(failed)})  # fmt: skip
            print(json.dumps(lives[-1]), flush=True)
    with serving(bed, home, LORA_PLUGINS_RESTORE="1") as server:
        lives.append({"forgotten": missing(server, bed, expected), "changes": []})
    return {"lives": lives, "vllm_alone": killed_alone(bed, home / "stock")}


def _is_cut(answer: Answer, deaths: Iterable[float]) -> bool:
    """Whether the first request of a connection, whose server is not known, ran as a server died."""
    return not answer.server and any(answer.began_at <= at <= answer.began_at + answer.took_s for at in deaths)


def done(server: Server, method: str, path: str) -> dict[str, Any]:
    answer = httpx.request(method, f"{server.url}{path}", timeout=END_S)
    return dict(answer.raise_for_status().json())


def missing(server: Server, bed: Bed, expected: dict[str, tuple[str, str, bool]]) -> list[str]:
    """What a server that was started again serves otherwise than it was told to."""
    wrong = []
    for name, (digest, original, is_pinned) in expected.items():
        body = {"model": name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, **GREEDY}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=END_S)
        if original == "blocked":
            wrong += [f"{name}: {answer.status_code}, not blocked"] * ("blocked" not in answer.text)
        elif answer.status_code != 200 or answer.json()["choices"][0]["token_ids"] != bed.answers[original]:
            wrong.append(f"{name}: {answer.status_code}, not {original}")
        elif answer.headers["x-lora-digest"] != digest:
            wrong.append(f"{name}: another digest")
        elif done(server, "GET", f"/v1/loras/{name}")["pinned"] != is_pinned:
            wrong.append(f"{name}: pinned is not {is_pinned}")
    return wrong


def killed_alone(bed: Bed, home: Path) -> dict[str, Any]:
    """What becomes of vLLM without plugins where one of its API servers is killed."""
    with serving(bed, home, **ALONE) as server:
        began = time.monotonic()
        os.kill(api_servers(server)[1], signal.SIGKILL)
        server.process.wait(END_S)
        return {"ended_s": round(time.monotonic() - began, 2), "exit_code": server.process.returncode}


# --- throughput ---


def throughput(bed: Bed, home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Answers per second, in turn: each round asks all servers for what they serve."""
    hot, rounds = originals_of(bed)[:4], list[dict[str, Any]]()
    alone = ("--lora-modules", *(f"{name}={bed.adapters / name}" for name in hot))
    arms: list[tuple[str, Server, list[str]]] = []
    with contextlib.ExitStack() as stack:
        for count in (1, COUNT):
            # Forked ones sleep between two looks for a message, which vLLM's engines do not.
            server, stock = (
                stack.enter_context(
                    serving(bed, home / f"{kind}-{count}", *more, count=count, is_forking=options.forked, **env)
                )
                for kind, more, env in (("ours", (), {}), ("alone", alone, ALONE))
            )
            for name in hot:
                push(name, bed.adapters / name, servers=[server.url])
            arms += [(f"base, {count}", server, ["base"]), (f"hot, {count}", server, hot)]
            arms.append((f"vLLM alone hot, {count}", stock, hot))
        for at in range(options.rounds + 1):
            row: dict[str, Any] = {}
            for arm, server, names in arms if at % 2 else reversed(arms):
                time.sleep(QUIET_S)
                with Caller(server.url, names, 2, options.at_once) as caller:
                    time.sleep(options.seconds)
                assert all(it.status == 200 for it in caller.answers), Counter(it.status for it in caller.answers)
                row[arm] = round(caller.per_s, 1)
                row[f"client_core {arm}"] = caller.core
            for kind in KINDS:
                row[f"{kind} ratio"] = round(row[f"{kind}, {COUNT}"] / row[f"{kind}, 1"], 3)
            print(json.dumps(row), flush=True)
            rounds += [row] * (at > 0)  # the first warms up
    ratios = {kind: median(row[f"{kind} ratio"] for row in rounds) for kind in KINDS}
    core = max(value for row in rounds for what, value in row.items() if what.startswith("client_core"))
    return {"rounds": rounds, "ratios": ratios, "largest_client_core": core, "is_client_bound": core > 0.9}


def goals_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was aimed at, and what was reached."""
    goals: list[tuple[str, str, float, bool]] = []
    if swapped := found.get("swaps"):
        for what in ("of another version", "begun after a swap, and old", "not answered"):
            count = swapped["found"].get(what, 0)
            goals.append((f"swaps: answers {what}", "0", count, count == 0))
    if killed := found.get("kills"):
        forgotten = sum(len(life["forgotten"]) for life in killed["lives"])
        wrong = sum(life.get("wrong", 0) for life in killed["lives"])
        others = sum(life.get("failed", {}).get("of others", 0) for life in killed["lives"])
        goals += [
            ("kills: forgotten", "0", forgotten, forgotten == 0),
            ("kills: wrong answers", "0", wrong, wrong == 0),
            ("kills of others than the first: requests of living API servers that failed", "0", others, others == 0),
        ]
        ended = sum("ended_s" in life for life in killed["lives"])
        goals.append(("kills: servers that ended with their first API server", "0", ended, ended == 0))
    if asked := found.get("throughput"):
        hot, base = (asked["ratios"][kind] for kind in ("hot", "base"))
        goals.append(("hot adapters, 4 API servers against 1", f"{base} (base)", hot, hot >= base))
    return [dict(zip(("what", "goal", "value", "met"), goal, strict=True)) for goal in goals]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    parser.add_argument("--kill-for-s", type=float, default=600.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each arm of a round of throughput")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--forked", action="store_true", help="for a try: servers of throughput start in seconds")
    parser.add_argument("--seed", type=int, default=28)
    options = parser.parse_args()
    load_before, bed = os.getloadavg()[0], prepare()
    measures = {"swaps": swaps, "kills": kills, "throughput": throughput}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-front-ends-") as folder:
        for case in options.case or CASES:
            found[case] = measures[case](bed, Path(folder) / case, options)
            print(json.dumps({case: found[case]}), flush=True)
    goals = goals_of(found)
    for goal in goals:
        print(f"{goal['what']}: {goal['value']}, goal {goal['goal']}{'' if goal['met'] else ': missed'}")
    name = "_".join(["front_ends", *(options.case or [])])
    print(keep(name, found, goals=goals, options=vars(options), load_before=load_before))
    return int(not all(goal["met"] for goal in goals if goal["what"].startswith(("swaps", "kills: forgotten"))))


if __name__ == "__main__":
    sys.exit(main())
