"""Goal of issue 40: a plain adapter's step costs the same as before there were vectors and trained tokens, ± 1 %.

Two engines take turns to decode 16 sequences, with 4 plain adapters of rank 16, on a random model with the shape of
SmolLM2-135M: with the package of a commit, by default the last before both, and with this checkout's package.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lora_plugins
from benchmarks.kernels.cpu import DTYPES, cases, environment_of, random_adapter, started
from benchmarks.record import ROOT, keep
from testbed.models import build_base

BEFORE = "29c31dfa"  # the parent of "Serve trained tokens as rows of a slot, in embedding and head"
RANK, WARM = 16, 2  # rounds that fill caches
ADAPTERS = cases(RANK)["four16"]


def answer(home: Path, dtype: str) -> None:
    """In the child: print the package's place, and for each line of the input the seconds of a decode."""
    _, run = started(home, RANK, dtype)
    print("SAID", Path(lora_plugins.__file__).parent, flush=True)
    for _ in sys.stdin:
        print("SAID", run(ADAPTERS, "decode"), flush=True)


def rounds_of(home: Path, roots: tuple[Path, Path], dtype: str, rounds: int) -> list[dict[str, Any]]:
    rows, children = [], []

    def said(child: Any) -> str:
        return next(line[5:-1] for line in child.stdout if line.startswith("SAID "))  # vLLM prints lines too

    with ExitStack() as stack:
        for root in roots:
            env = {**environment_of("ours"), "PYTHONPATH": f"{root}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}
            command = [sys.executable, "-m", "benchmarks.kernels.plain_step", "--child", str(home), "--dtype", dtype]
            child = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            children.append(stack.enter_context(child))
            assert said(children[-1]) == str(root / "lora_plugins")
        for number in range(-WARM, rounds):
            s = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                print(file=children[which].stdin, flush=True)
                s[which] = float(said(children[which]))
            row = {"dtype": dtype, "before_s": s[0], "now_s": s[1], "ratio": s[1] / s[0], "load": os.getloadavg()[0]}
            rows += [row] if number >= 0 else []
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("commit", nargs="?", default=BEFORE)
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    arguments.add_argument("--keep", action="store_true")
    arguments.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        answer(options.child, options.dtype[0])
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        home, before = Path(name), Path(name) / "before"
        before.mkdir()  # with the package alone: the benchmark in both engines is this checkout's
        files = subprocess.check_output(["git", "archive", options.commit, "lora_plugins"], cwd=ROOT)
        subprocess.run(["tar", "-x", "-C", before], input=files, check=True)
        build_base(home / "base", hidden=576, layers=30, vocab=49152, intermediate=1536, key_heads=3)
        for seed, adapter in enumerate(ADAPTERS):
            random_adapter(home / adapter, home / "base", RANK, seed)
        for dtype in options.dtype:
            rows += (found := rounds_of(home, (before, ROOT), dtype, options.rounds))
            low, median, high = statistics.quantiles([row["ratio"] for row in found], n=4)
            print(f"{dtype}: {median:.4f} of the seconds before ({low:.4f} to {high:.4f}); goal 0.99 to 1.01")
    if options.keep:
        print(keep("plain_step", rows, compared_with=options.commit))


if __name__ == "__main__":
    main()
