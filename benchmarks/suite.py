"""Goal of `make test`'s 600 s, and the order of its files (tests/seconds.json): `make bench-suite`.

What `make test` costs: seconds of wall and of both cores, by file; run it with nothing else on the machine.

    python -m benchmarks.suite --runs 10      # how often a test fails that should not
    python -m benchmarks.suite --load 8       # beside eight processes that compute
    python -m benchmarks.suite --more         # adds to the runs that are kept, of other commits too

Writes `tests/seconds.json`, from which tests are ordered (longest file first), and `benchmarks/results/suite.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks.record import RESULTS, ROOT, commit, keep
from tests.seconds import FILE

GOALS_S = {0: 600, 8: 1200}  # of one run, by load
MOST_TEST_LINES = 1.45  # for each line of the product


def main() -> int:
    """Run the tests; 1 where one of them failed or a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--load", type=int, default=0, help="processes that compute beside it")
    parser.add_argument("--more", action="store_true", help="add to the runs that are kept")
    options = parser.parse_args()
    result = "suite" + (f"_load_{options.load}" if options.load else "")
    subprocess.run(["make", "set-up"], cwd=ROOT, check=True)
    kept = json.loads((RESULTS / f"{result}.json").read_text())["rows"] if options.more else []
    runs = []
    for _ in range(options.runs):
        runs.append(run(options.load))
        print(json.dumps({name: found for name, found in runs[-1].items() if name != "files"}), flush=True)
    if not options.load and not any(run["failed"] for run in runs):
        FILE.write_text(json.dumps(dict(sorted(runs[-1]["files"].items())), indent=1) + "\n")
    print("\n".join(f"{seconds:6.0f} s  {file}" for file, seconds in Counter(runs[-1]["files"]).most_common(20)))
    runs = kept + runs
    goals = {
        "runs": (len(runs), None),
        "longest run": (max(run["wall_s"] for run in runs), GOALS_S.get(options.load)),
        "failed": (sum(run["failed"] for run in runs), 0),
        "test lines to product lines": (lines("tests") / lines("lora_plugins"), MOST_TEST_LINES),
    }
    for name, (found, most) in goals.items():
        print(f"{name}: {found:.2f}" + (f", goal ≤ {most}" if most is not None else ""))
    print(f"written to {keep(result, runs, load=options.load, goals=goals)}")
    return int(any(most is not None and found > most for found, most in goals.values()))


def run(load: int) -> dict[str, object]:
    """One run of `make test`, beside as many processes that compute."""
    with tempfile.TemporaryDirectory() as folder, computing(load):
        report = Path(folder) / "report.xml"
        added = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={report}"
        began, busy = time.monotonic(), busy_s()
        subprocess.run(["make", "test"], cwd=ROOT, env={**os.environ, "PYTEST_ADDOPTS": added}, check=False)
        wall_s, cpu_s = time.monotonic() - began, busy_s() - busy
        suite = ET.parse(report).getroot()[0]
    files: Counter[str] = Counter()
    for case in suite.iter("testcase"):
        files[file_of(case.attrib["classname"])] += float(case.attrib["time"])
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    return {
        "commit": commit(), "load_average": round(os.getloadavg()[2], 1),
        "wall_s": round(wall_s, 1), "cpu_s": None if load else round(cpu_s, 1), **counts,
        "failed": counts["failures"] + counts["errors"],
        "files": {file: round(seconds, 1) for file, seconds in files.items()},
    }  # fmt: skip


def file_of(classname: str) -> str:
    """`tests/e2e/test_admin.py` of `tests.e2e.test_admin`, or of a class in it."""
    parts = classname.split(".")
    while parts and not (ROOT / ("/".join(parts) + ".py")).is_file():
        parts.pop()
    return "/".join(parts) + ".py"


def busy_s() -> float:
    """Seconds that all cores have computed since the machine started; Linux."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def lines(folder: str) -> int:
    """Lines of all Python files in a folder."""
    return sum(len(path.read_bytes().splitlines()) for path in (ROOT / folder).rglob("*.py"))


@contextmanager
def computing(processes: int) -> Iterator[None]:
    """Inside, as many processes compute."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
