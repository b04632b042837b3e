"""A plugin of pytest for `make test`: what failed runs once more, alone, at the end; what passes then is flaky.

What fails again fails. Flaky tests are printed and kept in benchmarks/results/flaky.json, each with date, commit, load
and output: look at each before anything else, as most were defects of the product, and take the entry out with its
cause.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

MOST = 20  # more failures are no chance
_FLAKY = pytest.StashKey[dict[str, str]]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Run the failed tests again, in the process that distributes tests; all flaky is a success."""
    config = session.config
    if exitstatus != pytest.ExitCode.TESTS_FAILED or hasattr(config, "workerinput"):
        return
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    failed = {report.nodeid: report.longreprtext for kind in ("failed", "error") for report in stats.get(kind, ())}
    if len(failed) > MOST:
        return
    load = os.getloadavg()[0]
    flaky = config.stash[_FLAKY] = {test: text for test, text in failed.items() if _passes(test, config.rootpath)}
    _keep(flaky, config.rootpath, load)
    if len(flaky) == len(failed):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the flaky tests."""
    for test in config.stash.get(_FLAKY, {}):
        terminalreporter.write_line(f"FLAKY {test}: failed, and passed alone")


def _passes(test: str, root: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    # Without the run's own options: a report of the whole run must not be written again, of one test.
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=root, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 0


def _keep(flaky: dict[str, str], root: Path, load: float) -> None:
    if not flaky:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    path = root / "benchmarks" / "results" / "flaky.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(path.read_text()) if path.exists() else []
    entries += [
        {"test": test, "date": date, "commit": commit, "load": load, "output": text} for test, text in flaky.items()
    ]
    path.write_text(json.dumps(entries, indent=1) + "\n")
