"""Goal of issue 44: a change by the admin API beside 1,000 served names takes at most 8 ms (docs/benchmarks/scale.md).

    python -m benchmarks.live.changes [--keep]

Serves 1,000 adapters by name, then pins and unpins an idle one, a call after the other: an answered change is on disk.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

import httpx

from benchmarks.record import keep
from testbed.bed import prepare
from testbed.client import PLAIN_HTTP
from testbed.models import edit_config
from tests.e2e.servers import admin_server

NAMES, CALLS, AT_ONCE, GOAL_MS = 1_000, 400, 8, 8.0


def main() -> int:
    """Measure; 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/live_changes.json")
    options = parser.parse_args()
    bed, home = prepare(), Path(tempfile.mkdtemp())
    names = [f"sql-{number}" for number in range(NAMES)]
    for name in names:
        shutil.copytree(bed.adapters / "sql", home / "adapters" / name)
        edit_config(home / "adapters" / name, revision=name)  # a digest of its own
    taken_ms = []
    with (
        admin_server(bed, home, is_forking=False, LORA_PLUGINS_RESTORE="1") as server,
        httpx.Client(base_url=server.url, timeout=60, verify=PLAIN_HTTP) as client,
    ):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for answer in threads.map(lambda name: client.post("/v1/loras", json={"lora_name": name}), names):
                answer.raise_for_status()
        for number in range(CALLS):
            began = time.perf_counter()
            client.post(f"/v1/loras/{names[-1]}/{('pin', 'unpin')[number % 2]}").raise_for_status()
            taken_ms.append((time.perf_counter() - began) * 1e3)
    shutil.rmtree(home, ignore_errors=True)
    p50, p99 = median(taken_ms), quantiles(taken_ms, n=100)[98]
    print(f"a change beside {NAMES:,} names: p50 {p50:.1f} ms, p99 {p99:.1f} ms; goal ≤ {GOAL_MS:g} ms")
    if options.keep:
        print(f"written to {keep('live_changes', taken_ms, p50_ms=p50, p99_ms=p99)}")
    return int(p50 > GOAL_MS)


if __name__ == "__main__":
    sys.exit(main())
