"""Goal of R74: programs of others, unchanged, get the right answers of cold adapters: `make test-clients`.

    python -m benchmarks.clients                 # every program
    python -m benchmarks.clients openai lm-eval  # these; nothing is kept

One `vllm serve` of the tiny model with our plugins. Each program gets two names of its own that nobody has asked for
before, and a recorder between it and the server; PEFT computes what each name must have answered. Programs come from
the package indexes, each in an environment of its own; one that does not install within five minutes is left out, and
the result says so.

Writes clients.json below `benchmarks/results/`; 1 where a program failed, or got an answer that is not its adapter's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.clients.environments import NotInstalled
from benchmarks.clients.judged import faults_of
from benchmarks.clients.table import OF_VLLM, PROGRAMS, Program, Run
from benchmarks.record import keep
from benchmarks.recorder import Recorder
from testbed.bed import Bed, prepare
from testbed.reference import Reference
from testbed.server import ONE_THREAD, Server, outer_environment, plugged, vllm_server

ADAPTERS = ("sql", "chat")  # of the testbed; each program has both, under names of its own
# Answers without a temperature are the likeliest too, so that PEFT's are the same.
ARGUMENTS = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "4", "--max-cpu-loras", "64",
             "--max-model-len", "1000", "--max-num-batched-tokens", "1000", "--generation-config", "vllm",
             "--override-generation-config", '{"temperature": 0}')  # fmt: skip
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
LONGEST_S = 240.0


def names_of(program: str) -> tuple[str, str]:
    first, second = (f"{program}-{adapter}" for adapter in ADAPTERS)
    return first, second


@contextlib.contextmanager
def serving(bed: Bed, home: Path) -> Iterator[Server]:
    for program in ("control", *(it.name for it in PROGRAMS)):
        for adapter, name in zip(ADAPTERS, names_of(program), strict=True):
            shutil.copytree(bed.adapters / adapter, home / "adapters" / name)
    env = {**plugged("lora_plugins", home / "store", home / "adapters"), **ONE_THREAD}
    with vllm_server(bed.base, home / "server.log", arguments=ARGUMENTS, env=env) as server:
        yield server


def digests(server: Server) -> dict[str, str]:
    """The digest of each adapter's bytes, as the server says it of names that no program has."""
    said = {}
    for adapter, name in zip(ADAPTERS, names_of("control"), strict=True):
        body = {"model": name, "prompt": "x", "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
        said[adapter] = answer.headers["x-lora-digest"]
    if len(set(said.values())) != len(said):
        raise AssertionError(f"adapters of the same bytes: {said}")
    return said


async def ended(program: Program, run: Run) -> tuple[int, str]:
    """Run a program's commands; the status of the first that failed, and the end of what all printed."""
    env = {
        **{name: value for name, value in outer_environment().items() if name != "PYTHONPATH"},
        "HOME": str(run.folder),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": "none",
        "VLLM_PLUGINS": "",
        **program.env(run),
    }
    said = ""
    for command in program.commands(run):
        process = await asyncio.create_subprocess_exec(
            *command, env=env, cwd=run.folder, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            printed, _ = await asyncio.wait_for(process.communicate(), LONGEST_S)
            said += printed.decode(errors="replace")
        except TimeoutError:
            said += f"no end after {LONGEST_S:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if status := await process.wait():
            return status, said
    return 0, said


async def row_of(program: Program, server: Server, bed: Bed, home: Path, of_bytes: dict[str, str]) -> dict[str, Any]:
    """A program's row: what was installed, how it ended, how many answers it got, and what is wrong with them."""
    names, folder = names_of(program.name), home / program.name
    folder.mkdir()
    row: dict[str, Any] = {"program": program.name, "versions": {}}
    bin_folder = OF_VLLM
    if program.packages is not None:
        try:
            row["install_s"] = await asyncio.to_thread(program.packages.install)
        except NotInstalled as error:
            return row | {"left_out": str(error)[:300], "faults": []}
        row["versions"] = program.packages.versions()
        bin_folder = program.packages.bin
    began = time.monotonic()
    async with Recorder(server.url).running() as recorder:
        run = Run(recorder.url, bed.base, names, folder, bin_folder)
        status, said = await ended(program, run)
    row["took_s"] = round(time.monotonic() - began, 1)
    calls = [call for call in recorder.calls if call.path in ROUTES and call.status is not None]
    row["answers"] = {name: sum(call.model == name for call in calls) for name in names}
    row["routes"] = sorted({call.path for call in calls if call.model in names})
    row |= next((json.loads(line[6:]) for line in said.splitlines() if line.startswith("said: ")), {})
    adapters = {name: bed.adapters / adapter for name, adapter in zip(names, ADAPTERS, strict=True)}
    expected = {name: of_bytes[adapter] for name, adapter in zip(names, ADAPTERS, strict=True)}
    faults = await asyncio.to_thread(faults_of, calls, adapters, expected, Reference(bed.base))
    if status:
        faults.append(f"ended with {status}: {said[-1500:]}")
    return row | {"faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", metavar="program", help=", ".join(it.name for it in PROGRAMS))
    asked = parser.parse_args().programs
    if unknown := set(asked) - {it.name for it in PROGRAMS}:
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the server would outlive a time limit
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        home, bed = Path(folder), prepare()
        with serving(bed, home) as server:
            of_bytes = digests(server)
            for program in PROGRAMS:
                if not asked or program.name in asked:
                    rows.append(asyncio.run(row_of(program, server, bed, home, of_bytes)))
                    shown = {key: value for key, value in rows[-1].items() if key != "versions"}
                    print(json.dumps(shown)[:2500], flush=True)
            if (status := server.process.poll()) is not None:
                rows.append({"program": "vllm serve", "faults": [f"ended with {status}"]})
    took_s = round(time.monotonic() - began, 1)
    wrong = [row["program"] for row in rows if row["faults"]]
    left_out = [row["program"] for row in rows if "left_out" in row]
    print(f"{len(rows) - len(wrong) - len(left_out)} right, {len(wrong)} wrong, {len(left_out)} left out, {took_s} s")
    if not asked:
        keep("clients", rows, took_s=took_s, load=os.getloadavg())
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
