"""Figures of docs/benchmarks/real.md, for R66: `make bench-real`.

Adapters on a model that writes sentences, SmolLM2-135M-Instruct: `make bench-real`.

    python -m benchmarks.real                    # every part
    python -m benchmarks.real decode prefill     # these
    python -m benchmarks.real --quick            # each part to its end with a few requests; the figures mean nothing
    python -m benchmarks.real --page             # write the kept figures into docs/benchmarks/real.md

A part has servers of its own and its own deadline, and writes a file of its own in `benchmarks/results/` as soon as it
has ended; what was measured before a deadline or an error is written too. With `--quick` the files are in `.cache/`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.real import compared, first_token, many, page, speed, swaps
from benchmarks.real.bed import Bed, Figure
from benchmarks.record import RESULTS, ROOT, keep
from testbed.real_model import NoRealModel, real_model

CACHE = ROOT / ".cache" / "bench-real"


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
    "prefill": Part("Prefill of 16 prompts of 512 tokens", speed.prefill, speed.prefill_figures, 55, 300),
    "latency": Part("First token of an idle server", first_token.latency, first_token.latency_figures, 50, 300),
    "cold": Part("Cold beside streams", first_token.cold, first_token.cold_figures, 100, 360),
    "large": Part("Large and cold beside streams", first_token.large, first_token.large_figures, 150, 400),
    "zipf": Part("100 adapters under Zipf", many.zipf, many.zipf_figures, 70, 360),
    "thousand": Part("1,000 adapters in host memory", many.thousand, many.thousand_figures, 60, 420),
    "swaps": Part("Swaps under load", swaps.measure, swaps.figures, 150, 300),
    "ranks": Part("Rank of the slots", speed.ranks, speed.rank_figures, 0, 480),
    "compare": Part("Served as trained", compared.measure, compared.figures, 0, 600),
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


def table(title: str, figures: Sequence[Figure]) -> Table:
    result = Table(title=title, title_justify="left")
    result.add_column("what")
    result.add_column("figure", justify="right")
    for heading in ("spread", "goal", "met"):
        result.add_column(heading)
    for one in figures:
        met = "" if one.is_met is None else "yes" if one.is_met else "NO"
        result.add_row(one.what, one.value, one.spread, one.goal, met)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    titles = {name: part.title for name, part in PARTS.items()}
    if options.page:
        page.write(titles)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would outlive a time limit
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    try:
        base = real_model(lambda text: console.print(f"bench-real: {text}"))
    except NoRealModel as error:
        console.print(str(error))
        return 1
    failed, began = [], time.monotonic()
    for name in options.parts or PARTS:
        part = PARTS[name]
        console.print(f"bench-real: {part.title}")
        figures, has_ended = run(name, part, base, is_quick=options.quick)
        console.print(table(f"{part.title}{' (quick: figures mean nothing)' if options.quick else ''}", figures))
        failed += [] if has_ended else [name]
    console.print(f"bench-real: {time.monotonic() - began:.0f} s" + (f", failed: {', '.join(failed)}" * bool(failed)))
    if not options.quick:
        page.write(titles)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
