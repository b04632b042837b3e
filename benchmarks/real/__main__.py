"""Figures of docs/benchmarks/real.md, for R66: `make bench-real`.

Adapters on a model that writes sentences, SmolLM2-135M-Instruct.

    python -m benchmarks.real                    # every part
    python -m benchmarks.real decode cold        # these
    python -m benchmarks.real --quick            # each part to its end with a few requests; the figures mean nothing
    python -m benchmarks.real --page             # write the kept figures into docs/benchmarks/real.md

A part has servers of its own and its own deadline, and writes a file of its own in `benchmarks/results/` as soon as it
has ended; what was measured before a deadline or an error is written too. With `--quick` the files are in `.cache/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real import answers, cold, many, speed
from benchmarks.real.bed import Bed, Figure
from benchmarks.record import RESULTS, ROOT, keep, vllm_of
from testbed.real_model import NoRealModel, real_model

CACHE = ROOT / ".cache" / "bench-real"
PAGE = ROOT / "docs" / "benchmarks" / "real.md"
BEGIN, END = "<!-- figures: written by `make bench-real` -->", "<!-- /figures -->"


@dataclass(frozen=True)
class Part:
    """What is measured, how its rows become figures, and seconds: of each server's rounds, and of all at most."""

    title: str
    measure: Callable[[Bed, list[dict]], None]
    figures: Callable[[list[dict]], list[Figure]]
    rounds_s: float
    limit_s: int


PARTS = {
    "decode": Part("Decoding, 16 streams", speed.decode, speed.decode_figures, 40, 300),
    "cold": Part("Cold beside streams", cold.cold, cold.cold_figures, 100, 360),
    "large": Part("Large and cold beside streams", cold.large, cold.large_figures, 150, 400),
    "zipf": Part("100 adapters under Zipf", many.zipf, many.zipf_figures, 70, 360),
    "thousand": Part("1,000 adapters in host memory", many.thousand, many.thousand_figures, 60, 420),
    "swaps": Part("Swaps under load", answers.swaps, answers.swap_figures, 150, 300),
    "compare": Part("Served as trained", answers.compare, answers.compare_figures, 0, 600),
}


class Deadline(SystemExit):
    """A part took too long: raised wherever it is, so that its servers end."""


def run(name: str, part: Part, base: Path, *, is_quick: bool) -> tuple[list[Figure], bool]:
    """Measure one part and write it; its figures, and whether it came to its end."""
    rows: list[dict] = []
    began, load_before, failure = time.monotonic(), os.getloadavg()[0], ""
    CACHE.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=CACHE))
    try:
        with _deadline(part.limit_s):
            part.measure(Bed(base, home, part.rounds_s, is_quick), rows)
    except Deadline:
        failure = f"not ended after {part.limit_s} s"
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"[:2000]
    finally:
        for log in home.glob("*.log"):
            shutil.copy(log, CACHE / f"{name}-{log.name}")
        shutil.rmtree(home, ignore_errors=True)
        figures = part.figures(rows) if rows else []
        folder = CACHE / "quick" if is_quick else RESULTS
        folder.mkdir(exist_ok=True)
        took_s = round(time.monotonic() - began, 1)
        further = {"took_s": took_s, "load_before": load_before, **({"failure": failure} if failure else {})}
        kept = keep(f"real_{name}", rows, folder=folder, figures=[vars(one) for one in figures], **further)
    print(f"{name}: {failure or 'ended'} after {took_s:.0f} s, {kept.relative_to(ROOT)}", flush=True)
    return figures, not failure


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    def passed(*_: object) -> None:
        raise Deadline(f"{seconds} s have passed")

    signal.signal(signal.SIGALRM, passed)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def page(text: str, results: Path = RESULTS) -> str:
    """The page with the figures of each part that has a result."""
    before, _, rest = text.partition(BEGIN)
    files = {part.title: results / f"real_{name}.json" for name, part in PARTS.items()}
    kept = {title: json.loads(file.read_text()) for title, file in files.items() if file.exists()}
    machines = dict.fromkeys(map(_machine, kept.values()))
    parts = [f"{'; '.join(machines)}."] if machines else ["Not measured yet."]
    parts += [_part(title, result) for title, result in kept.items()]
    said = "\n\n".join(parts)
    return f"{before}{BEGIN}\n{said}\n{END}{rest.partition(END)[2]}"


def _machine(result: Mapping[str, Any]) -> str:
    return f"vLLM {vllm_of(result)} on {result['cpu']}, {result['cores']} cores"


def _part(title: str, result: Mapping[str, Any]) -> str:
    lines = [f"### {title}", f"{result['date']}, `{result['commit']}`, load before {result['load_before']:.1f}."]
    if "failure" in result:
        lines.append("\n**Not measured to its end.**")
    return "\n".join([*lines, "", table(result["figures"])])


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    has_goals = any(one["goal"] for one in figures)
    lines = ["| what | figure | spread |" + " goal |" * has_goals, "|---|---|---|" + "---|" * has_goals]
    for one in figures:
        met = "" if one["is_met"] is None else ", met" if one["is_met"] else ", **missed**"
        spread = one["spread"].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| {one['what']} | {one['value']} | {spread} |" + f" {one['goal']}{met} |" * has_goals)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.page:
        PAGE.write_text(page(PAGE.read_text()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would outlive a time limit
    try:
        base = real_model(lambda text: print(f"bench-real: {text}", flush=True))
    except NoRealModel as error:
        print(error)
        return 1
    failed, began = [], time.monotonic()
    for name in options.parts or PARTS:
        part = PARTS[name]
        print(f"bench-real: {part.title}{' (quick: figures mean nothing)' if options.quick else ''}", flush=True)
        figures, has_ended = run(name, part, base, is_quick=options.quick)
        print(table([vars(one) for one in figures]), flush=True)
        failed += [] if has_ended else [name]
    print(f"bench-real: {time.monotonic() - began:.0f} s" + (f", failed: {', '.join(failed)}" * bool(failed)))
    if not options.quick:
        PAGE.write_text(page(PAGE.read_text()))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
