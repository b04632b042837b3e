"""One call of a machine with a GPU: `python3 -m benchmarks.gpu_run check|tune|time`.

docs/explanation/kernels-gpu.md has the way. A call runs its parts one after the other, each in a process with a limit
of its own, so that a part that crashes or hangs costs neither the other parts nor what it had already written. All of
it lies in $OUT: a result for each part, a log for each, and run.json, which says how each part ended. Ends with 1 if
any part did not end well.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import gpu_compile
from benchmarks.gpu_result import Result
from benchmarks.record import ROOT


@dataclass(frozen=True)
class Part:
    """A module of `benchmarks`, and its share of the call's seconds."""

    module: str
    share: float


CALLS: dict[str, tuple[Part, ...]] = {
    "check": (Part("gpu_check", 0.7), Part("gpu_streams", 0.3)),
    "tune": (Part("tune_kernels", 1.0),),
    "time": (Part("kernels_gpu", 0.65), Part("gpu_step", 0.35)),
}
SECONDS = {"check": 300.0, "tune": 480.0, "time": 500.0}  # of the 30 minutes that a session has, starts included
GRACE_S = 25.0  # for a part to end what it was doing when its time was up


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_run")
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--seconds", type=float, help="of the whole call; the default leaves time for three calls")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if "OUT" in os.environ else None)
    parser.add_argument("--rehearse", action="store_true", help="tiny, without a GPU; measures nothing")
    options = parser.parse_args(argv)
    if options.out is None:
        parser.error("--out, or OUT in the environment, says where the results go")
    print(f"Triton's cache: {gpu_compile.use_cache_of_one_run()}", flush=True)
    result = Result(options.out, f"run_{options.call}", {}, rehearsal=options.rehearse)
    end = time.monotonic() + (options.seconds or SECONDS[options.call])
    codes = run(CALLS[options.call], options.out, end, result, rehearse=options.rehearse)
    result.finish()
    return int(any(codes))


def run(parts: Sequence[Part], out: Path, end: float, result: Result, *, rehearse: bool) -> list[int]:
    """Run the parts until the clock says `end`; what one leaves of its time, the next ones have."""
    codes = []
    for number, part in enumerate(parts):
        left = end - time.monotonic() - GRACE_S
        seconds = max(1.0, left * part.share / sum(other.share for other in parts[number:]))
        command = [sys.executable, "-u", "-m", f"benchmarks.{part.module}", "--seconds", f"{seconds:.0f}"]
        command += ["--out", str(out), *(["--rehearse"] if rehearse else [])]
        began = time.monotonic()
        code = logged(command, out / f"{part.module}.log", seconds + GRACE_S)
        codes.append(code)
        took = round(time.monotonic() - began, 1)
        result.add({"part": part.module, "seconds": round(seconds), "took_s": took, "exit_status": code})
    return codes


def logged(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Run a command, its output here and in a file; 124 past the limit, where it and all that it started are ended.

    Its process is the first of a session, so that nobody else is among those that are ended.
    """
    found = os.environ.get("PYTHONPATH")
    path = f"{ROOT}{os.pathsep}{found}" if found else str(ROOT)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        watch = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            file.flush()
        code = process.wait()
        watch.cancel()
    return 124 if code == -signal.SIGKILL else code


if __name__ == "__main__":
    sys.exit(main())
