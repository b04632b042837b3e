"""Goal of R43 and R61, and the table of docs/reference/deployments.md: `make matrix`.

What becomes of us in each deployment: runs the tests that say so; writes the table in docs/reference/deployments.md.

A test carries a cell by `pytest.mark.deployment(cell, verdict, note)`: it passes exactly when the verdict is true. A
cell whose test fails, or which nothing carries, is broken, and so is this command. `--cells` runs those only whose name
contains one of the words given; the others' rows stay as they were kept in benchmarks/results/deployments.json. With
`--page`, only the page is written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from benchmarks.record import RESULTS, ROOT, keep, vllm_of

PAGE = ROOT / "docs" / "reference" / "deployments.md"
KEPT = RESULTS / "deployments.json"
BEGIN, END = "<!-- table: written by `make matrix` -->", "<!-- /table -->"
REAL = ("tests/e2e/", "tests/front_ends/", "tests/models/", "tests/deployments/", "tests/ray/test_real_engine.py")
VERDICTS = {"tested": "tested", "refused": "refused", "vllm": "vLLM's limit"}

# The cells, in the page's order, by part of the page.
CELLS: dict[str, tuple[str, ...]] = {
    "Processes": (
        "one worker",
        "tensor parallel",
        "data parallel, one API server",
        "data parallel, several API servers",
        "several API servers",
        "pipeline parallel",
        "several API servers, static modules",
        "front end in Rust",
        "gRPC server",
        "Ray",
        "Ray Serve's app",
        "offline LLM",
        "AsyncLLM",
        "another package's LoRA manager",
        "our plugins without --enable-lora",
        "device given as a string",
        "mixture of experts, data parallel",
    ),
    "Memory and weights": (
        "sleep, level 1",
        "sleep, level 2",
        "reload_weights",
        "weight updates",
    ),
    "Engine features": (
        "speculative decoding",
        "beam search",
        "n > 1",
        "structured outputs",
        "prefix caching on and off",
        "chunked prefill",
        "preemption, tiny KV cache",
        "priority scheduling",
        "pause and resume",
        "storms of aborts",
        "embeddings and pooling",
        "torch.compile",
        "--max-loras 1",
        "every adapter pinned",
    ),
    "RL frameworks": (
        "verl",
        "ms-swift",
        "SkyRL",
        "prime-rl",
        "ART",
        "Unsloth",
        "TRL, OpenRLHF",
        "vLLM's own calls",
    ),
    "File systems": (
        "full disk",
        "store on a read-only file system",
        "store shared by two users",
        "store on an unmounted file system",
    ),
}


@dataclass
class Part:
    """What is known of a cell from one mark.

    Attributes:
        how: "engine" for tests with a real engine, "unit" for others.
        tests: outcome ("passed", "failed", "skipped: why") by node id. seconds: of all of them, with their set-up.
    """

    cell: str
    verdict: str
    note: str
    how: str
    tests: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_broken(self) -> bool:
        return not self.tests or any(outcome not in {"passed", "skipped"} for outcome in _kinds(self))


def _kinds(part: Part) -> list[str]:
    return [outcome.partition(":")[0] for outcome in part.tests.values()]


class Collector:
    """A plugin of pytest: keeps the tests that carry a cell that was asked for, and notes what became of them."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [word.strip().lower() for word in words if word.strip()]
        self.parts: list[Part] = []
        self.errors: list[str] = []
        self._by_test: dict[str, list[Part]] = {}

    def wants(self, cell: str) -> bool:
        return not self.words or any(word in cell.lower() for word in self.words)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        marked: dict[tuple[str, ...], Part] = {}
        for item in items:
            for mark in item.iter_markers("deployment"):
                cell, verdict, note = mark.args
                how = "engine" if item.nodeid.startswith(REAL) else "unit"
                if self.wants(cell):
                    part = marked.setdefault((cell, verdict, note, how), Part(cell, verdict, note, how))
                    self._by_test.setdefault(item.nodeid, []).append(part)
        self.parts = [*marked.values()]
        self.errors += [f"{part.cell}: no such cell" for part in self.parts if part.cell not in _order()]
        self.errors += [f"{part.cell}: what is {part.verdict}?" for part in self.parts if part.verdict not in VERDICTS]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._by_test])
        items[:] = [item for item in items if item.nodeid in self._by_test]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for part in self._by_test.get(report.nodeid, ()):
            part.seconds += report.duration
            before = part.tests.get(report.nodeid, "passed")
            if report.skipped:
                part.tests[report.nodeid] = f"skipped: {_why_skipped(report)}"
            elif before == "passed":
                part.tests[report.nodeid] = report.outcome


def _why_skipped(report: pytest.TestReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _order() -> list[str]:
    return [cell for cells in CELLS.values() for cell in cells]


def _files() -> list[str]:
    marking = [file for file in (ROOT / "tests").rglob("test_*.py") if "mark.deployment(" in file.read_text()]
    return sorted(str(file.relative_to(ROOT)) for file in marking)


def run(words: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the tests of these cells, all without words; returns a row for each part, and what is wrong with marks."""
    collector = Collector(words)
    chosen = "nightly or not nightly"  # tests/conftest.py leaves nightly tests out unless -m names them
    ended = pytest.main(["-m", chosen, "-p", "no:cacheprovider", "-v", "--tb=short", *_files()], plugins=[collector])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {ended!r}: nothing is kept of a run that is not whole")
    parts = sorted(collector.parts, key=lambda part: _order().index(part.cell) if part.cell in _order() else -1)
    known = {part.cell for part in parts}
    missing = [Part(cell, "tested", "no test carries it", "engine") for cell in _order() if collector.wants(cell)]
    rows = [*parts, *(part for part in missing if part.cell not in known)]
    return [{**asdict(part), "seconds": round(part.seconds, 1), "is_broken": part.is_broken} for part in rows], (
        collector.errors
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page's table, from rows of `run`."""
    lines = []
    for name, cells in CELLS.items():
        lines += [f"### {name}", "| deployment | verdict | what is shown | tests |", "|---|---|---|---|"]
        for cell in cells:
            of_verdict: dict[str, list[Mapping[str, Any]]] = {}
            for row in rows:
                if row["cell"] == cell:
                    of_verdict.setdefault(_verdict(row), []).append(row)
            lines += [
                f"| {cell if i == 0 else ''} | {verdict} | {_notes(of_cell)} | {_files_of(of_cell)} |"
                for i, (verdict, of_cell) in enumerate(of_verdict.items())
            ]
            lines += [f"| {cell} | **broken** | never run | |"] * (not of_verdict)
        lines.append("")
    return "\n".join(lines)


def _verdict(row: Mapping[str, Any]) -> str:
    skipped = sorted({outcome for outcome in row["tests"].values() if outcome.startswith("skipped")})
    if row["is_broken"]:
        return "**broken**"
    return f"not run here ({'; '.join(skipped)})" if skipped else VERDICTS[row["verdict"]]


def _notes(rows: Sequence[Mapping[str, Any]]) -> str:
    """The notes of a row; those that differ before the first colon alone share the rest: `LLM / AsyncLLM: …`.

    Versions are named once where vLLM without our plugins and with them answers by the same, and not where each step's
    version answers.
    """
    begun_by: dict[str, list[str]] = {}
    for note in dict.fromkeys(row["note"] for row in rows):
        begin, colon, end = note.partition(": ")
        end = re.sub(r"; stock: (.+); ours: \1$", r"; \1", end).removesuffix("; v1, v2")
        begun_by.setdefault(colon + end if colon else note, []).append(begin if colon else "")
    return " · ".join(" / ".join(begins) + end for end, begins in begun_by.items())


def _files_of(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"`{file}`" for file in sorted({test.partition("::")[0] for row in rows for test in row["tests"]}))


def page(text: str, result: Mapping[str, Any]) -> str:
    """The page with its table written again."""
    before, _, rest = text.partition(BEGIN)
    said = (
        f"vLLM {vllm_of(result)} on {result['cpu']}, {result['cores']} cores,"
        f" {result['date']}, commit `{result['commit']}`."
    )
    return f"{before}{BEGIN}\n{said}\n\n{table(result['rows'])}{END}{rest.partition(END)[2]}"


def _has_broken(rows: Sequence[Mapping[str, Any]], cell: str) -> bool:
    return any(row["is_broken"] for row in rows if row["cell"] == cell)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default="", help="words, with commas: only cells whose name contains one of them")
    parser.add_argument("--page", action="store_true", help="write the page from what is kept")
    options = parser.parse_args()
    errors: list[str] = []
    if not options.page:
        words = [word for word in options.cells.split(",") if word.strip()]
        rows, errors = run(words)
        collector = Collector(words)
        kept = json.loads(KEPT.read_text())["rows"] if words and KEPT.exists() else []
        rows += [row for row in kept if not collector.wants(row["cell"]) and row["cell"] in _order()]
        keep("deployments", sorted(rows, key=lambda row: _order().index(row["cell"])))
    result = json.loads(KEPT.read_text())
    PAGE.write_text(page(PAGE.read_text(), result))
    print(table(result["rows"]))
    shown = {row["cell"] for row in result["rows"] if not row["is_broken"]}
    broken = [cell for cell in _order() if cell not in shown or _has_broken(result["rows"], cell)]
    for line in [*errors, *(f"broken: {cell}" for cell in broken)]:
        print(line, file=sys.stderr)
    return int(bool(errors or broken))


if __name__ == "__main__":
    sys.exit(main())
