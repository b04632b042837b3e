"""The programs for a machine with a GPU: `python -m benchmarks.gpu all|check|streams|tune|time|compile|prepare`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu import cases, device, vllm
from benchmarks.record import RESULTS

# Seconds of each program that runs alone; `run_parts` divides those of `all`, for a machine lent for 15 minutes.
SECONDS = {"check": 240.0, "streams": 120.0, "tune": 480.0, "time": 500.0, "compile": 3600.0, "all": 450.0}
# Users of `auto` run vLLM's kernels, beside which slots are written too: so `streams` comes first.
PART_SECONDS = {"streams": 90.0, "check": 115.0, "time": 175.0, "tune": 70.0}
BEGINS_NOTHING_NEW = 0.75  # of a part's time: imports come before it, and the last row after it
_GRACE_S = 2.0

Command = Callable[[str, float], Sequence[str]]


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    programs = made.add_subparsers(dest="program", required=True)
    for name, text in {
        "check": "every operator against float64",
        "streams": "slots written beside a running graph, with and without each wait",
        "tune": "a tuning table for this GPU",
        "time": "ours, vLLM's, the base model's products and the memory floor",
        "compile": "what `check` launches, for sm_90; needs no GPU",
        "all": "streams, check, time and tune in one call, each until its deadline",
    }.items():
        program = programs.add_parser(name, help=text)
        program.add_argument("--seconds", type=float, default=SECONDS[name], help="after this it begins nothing new")
        program.add_argument("--table", type=Path, help="another tuning table")
        program.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
        program.add_argument("--rehearse", action="store_true", help="tiny, without a GPU; measures nothing")
    prepare = programs.add_parser("prepare", help="fill .cache/gpu, which travels to a machine with a GPU")
    prepare.add_argument("sources", type=Path, help="an unpacked wheel of vLLM 0.33")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one program; 1 where it did not end well."""
    options = parser().parse_args(argv)
    # A folder of its own for what Triton compiles; the processes that compile inherit it.
    os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/lora_plugins_triton")
    if options.program == "prepare":
        vllm.prepare(options.sources)
        return 0
    if options.program == "compile":
        return int(not compiled(options.table, options.seconds))
    if options.program == "all":
        given = {"--table": options.table, "--out": options.out}
        carried = [str(part) for name, value in given.items() if value is not None for part in (name, value)]
        carried += ["--rehearse"] * options.rehearse
        return int(not run_parts(options.seconds, command_of(carried)))
    gpu = device.device(rehearse=options.rehearse)
    theirs = vllm.load(rehearse=gpu.rehearsal) if options.program == "time" else None
    if gpu.rehearsal:
        cases.MODELS["Llama-8B"] = cases.TINY
    # These import Triton, which must know by now whether it is to interpret.
    from benchmarks.gpu import check, operators, streams, tune
    from benchmarks.gpu.session import Session

    session = Session(gpu, options)
    if theirs is not None:
        return int(not operators.run(session, theirs))
    return int(not {"check": check, "streams": streams, "tune": tune}[options.program].run(session))


def command_of(options: Sequence[str]) -> Command:
    """How a part is started, by its name and seconds; every part gets the options."""
    start = [sys.executable, "-m", "benchmarks.gpu"]
    return lambda part, seconds: [*start, part, "--seconds", f"{seconds:.0f}", *options]


def run_parts(seconds: float, command: Command) -> bool:
    """Run all parts within the seconds, each in a process of its own until its deadline; whether each has ended well.

    A part that is over its time, or fails, costs the other parts nothing: programs write as rows come.
    """
    began, share, said = time.monotonic(), seconds / sum(PART_SECONDS.values()), dict[str, str]()
    ends = began
    for part, of_part in PART_SECONDS.items():
        ends += of_part * share  # what a part leaves of its time goes to the next
        left = ends - time.monotonic()
        process = subprocess.Popen(command(part, left * BEGINS_NOTHING_NEW), start_new_session=True)
        try:
            said[part] = f"ended with {process.wait(max(0.0, left - _GRACE_S))}"
        except subprocess.TimeoutExpired:
            said[part] = "was ended at its deadline"
            # With the processes that compile for it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        print(f"{part} {said[part]}, {time.monotonic() - began:.0f} s after the start", flush=True)
    return set(said.values()) == {"ended with 0"}


def compiled(table: Path | None, seconds: float) -> bool:
    """Compile for sm_90 what `check` launches, on all cores."""
    os.environ.pop("TRITON_INTERPRET", None)
    from benchmarks.gpu import check
    from benchmarks.gpu.session import Compilers
    from lora_plugins.kernels import tuning

    jobs = check.compile_jobs(list(check.checks()), tuning.read_table(table) if table else tuning.load_table("sm_90"))
    began = time.monotonic()
    with Compilers(90, processes=os.cpu_count()) as compilers:
        problems = compilers.compile(jobs, began + seconds)
        took = time.monotonic() - began
        print(f"{compilers.compiled} kernels for {len(jobs)} calls in {took:.0f} s by {os.cpu_count()} processes")
    print(*problems, sep="\n")
    return not problems


if __name__ == "__main__":
    sys.exit(main())
