"""Figure of docs/benchmarks/index.md#several-api-servers, for R56 and R68: `make bench-front-ends`.

Answers per second of the base model and of hot adapters, of one API server and of four, in turn. All callers are in
processes of their own; a connection is closed after 20 answers, so that all API servers get some.

Keeps benchmarks/results/front_ends_throughput.json; returns 1 where four API servers gain less with adapters than with
the base model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.callers import Caller
from benchmarks.record import keep
from lora_plugins.client import push
from testbed.bed import Bed, prepare
from testbed.server import ONE_THREAD, Server, plugged, vllm_server

COUNT = 4
PLUGINS = "lora_filesystem_resolver,lora_lru_manager,lora_kernels,lora_admin"
END_S = 240.0  # for a server that must start or end
QUIET_S = 2.0  # the threads of an engine that has just computed spin for a while, and would slow the next
KINDS = ("base", "hot")  # of what is asked for


@contextlib.contextmanager
def serving(bed: Bed, home: Path, *, count: int, is_forking: bool) -> Iterator[Server]:
    """A server with `count` API servers over the adapters and the store in `home`; a forked one starts in seconds."""
    (home / "adapters").mkdir(parents=True)
    # vLLM makes one before it spawns its API servers; a forked one has imported prometheus_client before.
    env = {"PROMETHEUS_MULTIPROC_DIR": tempfile.mkdtemp(dir=home)} if count > 1 else {}
    with vllm_server(
        bed.base,
        home / "server.log",
        arguments=(
            *("--enable-lora", "--max-lora-rank", "64", "--max-loras", "4", "--max-cpu-loras", "16"),
            *("--max-num-seqs", "64", "--served-model-name", "base", "--api-server-count", str(count)),
        ),
        env={
            **plugged(PLUGINS, home / "store", home / "adapters"),
            **ONE_THREAD,
            "LORA_PLUGINS_REFRESH_S": "0",
            **env,
        },
        is_forking=is_forking,
    ) as server:
        ends_at = time.monotonic() + END_S
        while server.log().count("Application startup complete") < count:  # the port answers as soon as one listens
            assert time.monotonic() < ends_at, server.log()[-2000:]
            time.sleep(0.1)
        yield server


def throughput(bed: Bed, home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Answers per second, in turn: each round asks all servers for what they serve."""
    hot, rounds = [name for name in bed.answers if name is not None][:4], list[dict[str, Any]]()
    arms: list[tuple[str, Server, list[str]]] = []
    with contextlib.ExitStack() as stack:
        for count in (1, COUNT):
            # Forked ones sleep between two looks for a message, which vLLM's engines do not.
            server = stack.enter_context(serving(bed, home / f"{count}", count=count, is_forking=options.forked))
            for name in hot:
                push(name, bed.adapters / name, servers=[server.url])
            arms += [(f"base, {count}", server, ["base"]), (f"hot, {count}", server, hot)]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each arm of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--forked", action="store_true", help="for a try: servers start in seconds")
    options = parser.parse_args()
    load_before, bed = os.getloadavg()[0], prepare()
    with tempfile.TemporaryDirectory(prefix="bench-front-ends-") as folder:
        found = throughput(bed, Path(folder), options)
    hot, base = (found["ratios"][kind] for kind in ("hot", "base"))
    is_met = hot >= base
    what = "hot adapters, 4 API servers against 1"
    print(f"{what}: {hot}, goal {base} (base){'' if is_met else ': missed'}")
    goals = [{"what": what, "goal": f"{base} (base)", "value": hot, "met": is_met}]
    print(keep("front_ends_throughput", found, goals=goals, options=vars(options), load_before=load_before))
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
