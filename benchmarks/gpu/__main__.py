"""The programs for a machine with a GPU: `python -m benchmarks.gpu all|check|streams|tune|time|compile|prepare`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import cases, device, parts, vllm
from benchmarks.record import RESULTS

# Seconds of each program that runs alone; `parts` divides those of `all`, for a machine that is lent for 15 minutes.
SECONDS = {"check": 240.0, "streams": 120.0, "tune": 480.0, "time": 500.0, "compile": 3600.0, "all": 450.0}


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
        from benchmarks.gpu.prepare import prepare

        prepare(options.sources)
        return 0
    if options.program == "compile":
        return int(not compiled(options.table, options.seconds))
    if options.program == "all":
        given = {"--table": options.table, "--out": options.out}
        carried = [str(part) for name, value in given.items() if value is not None for part in (name, value)]
        carried += ["--rehearse"] * options.rehearse
        return int(not parts.run(options.seconds, parts.command_of(carried)))
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


def compiled(table: Path | None, seconds: float) -> bool:
    """Compile for sm_90 what `check` launches, on all cores."""
    os.environ.pop("TRITON_INTERPRET", None)
    from benchmarks.gpu import check
    from benchmarks.gpu.compiling import Compilers
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
