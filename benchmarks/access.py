"""Figure of docs/benchmarks/routing.md#access-by-the-clock, for R38: `make bench-access`.

Whether response times distinguish an adapter that a key may not use from one that does not exist.

One real server with a directory and an S3 (moto) as sources, `lora_admin` and a policy. A tenant asks, in an order
drawn at random, for names of five kinds: another tenant's that are loaded, that are only at a source, and that do not
exist (twice, as a control); and names of its own that do not exist. Each name is asked for once, and then again, when
S3's "no such adapter" is remembered.

Prints the medians, and how likely a name of a kind takes longer than one of the control: 0.5 where times reveal
nothing. Keeps benchmarks/results/access.json.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.record import keep
from testbed.bed import prepare
from testbed.s3 import s3_server
from testbed.server import plugged, vllm_server

PLUGINS = "lora_filesystem_resolver,lora_s3_resolver,lora_lru_manager,lora_admin"
NAMES = 60
AGAIN = 5
POLICY = """
[tenants.a]
keys = ["key-a"]
adapters = ["team-a/*"]
[tenants.operators]
keys = ["key-root"]
admin = true
"""
CONTROL = "forbidden, does not exist, control"
KINDS = {
    "forbidden, loaded": "team-b/loaded-{}",
    "forbidden, at a source": "team-b/source-{}",
    "forbidden, does not exist": "team-b/nobody-{}",
    CONTROL: "team-c/nobody-{}",
    "allowed, does not exist": "team-a/nobody-{}",
}


def main() -> None:
    bed = prepare()
    with tempfile.TemporaryDirectory() as folder, s3_server() as s3:
        home = Path(folder)
        for kind in ("loaded", "source"):
            for number in range(NAMES):
                shutil.copytree(bed.adapters / "sql", home / "adapters" / f"team-b/{kind}-{number}")
        s3.bucket("adapters")
        (home / "policy.toml").write_text(POLICY)
        with vllm_server(
            bed.base,
            home / "server.log",
            arguments=(
                *("--enable-lora", "--max-lora-rank", "64", "--max-cpu-loras", "100"),
                *("--api-key", "key-a", "key-root"),
            ),
            env={
                **plugged(PLUGINS, home / "store", home / "adapters"),
                "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}",
                "LORA_PLUGINS_POLICY": str(home / "policy.toml"),
                "LORA_PLUGINS_ABSENT_TTL_S": "600",
                "LORA_PLUGINS_REFRESH_S": "0",
                **s3.env(),
            },
        ) as server:
            rows = measure(server.url)
    print("| asked for | names | first, median ms | longer than control | again, median ms | longer than control |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['kind']} | {NAMES} | {row['first_ms']:.2f} | {row['first_longer']:.2f} "
            f"| {row['again_ms']:.2f} | {row['again_longer']:.2f} |"
        )
    print(f"\nkept {keep('access', rows)}")


def measure(url: str) -> list[dict[str, object]]:
    with httpx.Client(base_url=url, timeout=60) as client:

        def ask(name: str, key: str) -> tuple[int, float]:
            started = time.perf_counter()
            body = {"model": name, "prompt": "x", "max_tokens": 1}
            answer = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            return answer.status_code, time.perf_counter() - started

        for number in range(NAMES):
            assert ask(KINDS["forbidden, loaded"].format(number), "key-root")[0] == 200
        for number in range(20):
            ask(f"team-a/warm-{number}", "key-a")
        asked = [(kind, shape.format(number)) for kind, shape in KINDS.items() for number in range(NAMES)]
        order = random.Random(20261121)
        first: dict[str, list[float]] = {kind: [] for kind in KINDS}
        again: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for times in (first, *[again] * AGAIN):
            order.shuffle(asked)
            for kind, name in asked:
                status, seconds = ask(name, "key-a")
                assert status == 404, name
                times[kind].append(seconds * 1e3)
    return [
        {
            "kind": kind,
            "first_ms": statistics.median(first[kind]),
            "first_longer": longer(first[kind], first[CONTROL]),
            "again_ms": statistics.median(again[kind]),
            "again_longer": longer(again[kind], again[CONTROL]),
            "all_first_ms": [round(each, 3) for each in first[kind]],
            "all_again_ms": [round(each, 3) for each in again[kind]],
        }
        for kind in KINDS
    ]


def longer(some: Sequence[float], others: Sequence[float]) -> float:
    """How often one of `some` is longer than one of `others`; ties count half."""
    return statistics.fmean((one > other) + (one == other) / 2 for one in some for other in others)


if __name__ == "__main__":
    main()
