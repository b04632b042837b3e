"""Goal of R74 and R75, and the figures of docs/explanation/frameworks.md: `make test-trainers`.

RL frameworks' own programs, on vLLM alone and with our plugins, by turns.

    python -m benchmarks.frameworks                    # every part
    python -m benchmarks.frameworks trl clients        # these
    python -m benchmarks.frameworks --arms ours --steps 3
    RUNNER=v2 python -m benchmarks.frameworks clients  # on Model Runner V2, asynchronous; nothing is kept

- `trl`: TRL's AsyncGRPOTrainer trains SmolLM2 with adapters alone; a recorder between trainer and server
  counts rollouts and syncs, PEFT computes whose weights answered, TRL's client unloads beside eight streams.
- `clients`: ART's service and SkyRL's client and routes, on a small model.
- `verl`: verl's worker extension.

Writes frameworks.json below `benchmarks/results/`; 1 where a rollout failed or was cut, where weights were not their
version's, or where a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.frameworks.judged import Run, Weights, figures
from benchmarks.record import ROOT, keep
from testbed import v2_runner
from testbed.bed import prepare
from testbed.frameworks.forms import FORMS, OF_VERL
from testbed.frameworks.packages import FRAMEWORKS, NoFrameworks, frameworks
from testbed.frameworks.runs import run_kind
from testbed.frameworks.versions import LONG, PROMPT, Versions, prepare_versions, whose
from testbed.real_model import NoRealModel, real_model
from testbed.server import ONE_THREAD, Server, outer_environment, plugged, vllm_server

PLUGINS = {"ours": "lora_plugins", "stock": ""}
STALENESS = (0, 2)
TOKENS = 96  # of a rollout: it outlives several versions
SYNC_GOAL, UNLOAD_GOAL_S = 1.2, 0.020
IDLE, IN_USE = 60, 20  # unloads beside streams
# 26 blocks of 32 tokens are fewer than eight rollouts need. All prompts fit into a step: vLLM 0.32 on the CPU crashes
# where a prompt of a request with a seed is split, and all of TRL's have one.
ARGUMENTS = ("--max-model-len", "512", "--max-num-batched-tokens", "2048", "--block-size", "32",
             "--num-gpu-blocks-override", "26", "--max-lora-rank", "8", "--enable-lora",
             "--disable-uvicorn-access-log")  # fmt: skip
LONGEST_S = 600.0
ON_V2 = os.environ.get("RUNNER") == "v2"


@contextlib.contextmanager
def serving(base: Path, home: Path, arm: str, *arguments: str, program: str | None = None) -> Iterator[Server]:
    """A server of an arm, as these frameworks' guides start theirs."""
    home.mkdir(parents=True)
    arguments = (*arguments, *(v2_runner.ARGUMENTS if ON_V2 else ()))
    env = {
        **(v2_runner.ENVIRONMENT if ON_V2 else {}),
        **plugged(PLUGINS[arm], home / "store"), **ONE_THREAD, "VLLM_SERVER_DEV_MODE": "1",
    }  # fmt: skip
    more: dict[str, Any] = {} if program is None else {"is_forking": True, "program": program}
    server = vllm_server(base, home / "server.log", arguments=arguments, env=env, **more)
    with v2_runner.checked(server) if ON_V2 else server as served:
        yield served


async def program(name: str, *arguments: object, log: Path) -> tuple[int, str]:
    """Run one of `programs` beside the frameworks' packages; its exit status, and its last line on stdout."""
    env = {
        **outer_environment(), **ONE_THREAD, "PYTHONPATH": f"{ROOT}{os.pathsep}{frameworks()}", "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "benchmarks.frameworks.programs", name, *map(str, arguments)]
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, env=env, cwd=log.parent, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True
        )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), LONGEST_S)
    except TimeoutError:
        said = b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # TRL has a process of its own for rollouts
    status = await process.wait()
    if status:
        print(f"{name} ended with {status}:\n" + log.read_text(errors="replace")[-2000:], flush=True)
    return status, (said.decode().splitlines() or [""])[-1]


def preemptions(server: Server) -> int:
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    lines = (line for line in page.splitlines() if line.startswith("vllm:num_preemptions_total{"))
    return round(sum(float(line.split()[-1]) for line in lines))


def clear(server: Server) -> None:
    """What a trainer that ended leaves behind: versions that the next run would meet again."""
    httpx.post(f"{server.url}/resume", timeout=60).raise_for_status()
    for model in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]:
        if model.get("parent"):
            httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": model["id"]}, timeout=120)


async def train(server: Server, base: Path, home: Path, staleness: int, steps: int, slots: int | None) -> Run:
    """One run of TRL's trainer through a recorder."""
    home.mkdir()
    async with Run(server.url, kept=home / "kept", slots=slots).running() as recorder:
        arguments = (recorder.url, base, home / "out", steps, staleness, TOKENS)
        recorder.status, _ = await program("trl_trainer", *arguments, log=home / "trl.log")
    return recorder


def trl(arms: Sequence[str], base: Path, home: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Sessions of one server each: with as many slots as TRL asks for, by turns, and ours with one."""
    sessions = [(arm, max(STALENESS) + 2) for arm in arms] + [("ours", 1)] * ("ours" in arms)
    for place, (arm, slots) in enumerate(sessions):
        folder = home / f"{place}-{arm}-{slots}"
        runs: list[tuple[int, Run, int]] = []
        with serving(base, folder, arm, *ARGUMENTS, "--max-loras", str(slots)) as server:
            for staleness in STALENESS if slots > 1 else STALENESS[-1:]:
                before, asked = preemptions(server), staleness + 2 if slots == 1 else None
                recorder = asyncio.run(train(server, base, folder / str(staleness), staleness, steps, asked))
                runs.append((staleness, recorder, preemptions(server) - before))
                clear(server)
            kept = next((folder / str(STALENESS[-1]) / "kept").iterdir(), None)
            if slots > 1 and kept is not None:
                unloads = program("trl_client", server.url, kept, IDLE, IN_USE, log=folder / "client.log")
                _, said = asyncio.run(unloads)
                yield {"program": "TRL's VLLMClient", "arm": arm, **json.loads(said or "{}")}
        for staleness, recorder, preempted in runs:
            out = folder / str(staleness) / "out" / ".vllm_lora"
            left = sorted(path.name for path in out.iterdir()) if out.exists() else []
            loaded = len(list(recorder.kept.iterdir()))
            yield {
                "program": "TRL's AsyncGRPOTrainer", "arm": arm, "max_staleness": staleness, "max_loras": slots,
                "status": recorder.status, "preemptions": preempted, "directories_deleted": loaded - len(left),
                **figures(recorder.calls), "weights": Weights(base, recorder.kept).of(recorder.calls),
            }  # fmt: skip
            shutil.rmtree(folder / str(staleness), ignore_errors=True)


def clients(arms: Sequence[str], versions: Versions, home: Path) -> Iterator[dict[str, Any]]:
    """ART's service and SkyRL's client, one after the other on one server of each arm."""
    right = {
        "art": {"1": "v1", "2": "v2", "1, pruned": "error"},
        "skyrl": {"1": "v1", "2": "v2", "running": "v1", "unloaded": "error"},
    }
    names = {"art": "ART's UnslothService", "skyrl": "SkyRL's RemoteInferenceClient"}
    arguments = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4",
                 "--max-model-len", "1000", "--block-size", "32")  # fmt: skip
    for arm in arms:
        folder = home / arm
        with serving(
            versions.base, folder, arm, *arguments, program="benchmarks.frameworks.programs:skyrl_server"
        ) as server:
            for name, title in names.items():
                given = (server.url, versions.base, versions.root / "v1", versions.root / "v2", folder / f"{name}-out")
                calls = program(name, *given, json.dumps(PROMPT), LONG, log=folder / f"{name}.log")
                status, line = asyncio.run(calls)
                said = json.loads(line) if status == 0 else {"said": {}}
                found = {
                    step: sorted({whose(answer, versions.answers) for answer in answers})
                    for step, answers in said["said"].items()
                }
                wanted = {step: [version] for step, version in right[name].items()}
                yield {**said, "program": title, "arm": arm, "status": status, "said": found, "right": wanted}


def verl(arms: Sequence[str], versions: Versions, home: Path) -> Iterator[dict[str, Any]]:
    (form,) = (form for form in FORMS if form.kind == OF_VERL)
    for arm in arms:
        plugins = [PLUGINS[arm]] if PLUGINS[arm] else []
        row = run_kind(OF_VERL, versions, home / arm, plugins)[form.name]
        yield {"program": "verl's worker extension", "arm": arm, "said": row["whose"], "right": list(form.right)}


def faults(row: Mapping[str, Any]) -> list[str]:
    """Why a program's row is wrong, apart from its seconds."""
    found = list(map(str, row.get("faults", ())))
    if row.get("status"):
        found.append(f"ended with {row['status']}")
    if row.get("error"):
        found.append(row["error"])
    if "right" in row and row["said"] != row["right"]:
        found.append(f"answers of {row['said']}, not of {row['right']}")
    if "weights" in row:
        weights = row["weights"]
        if weights["own"] < weights["computed"] or weights["told_apart"] < weights["computed"] / 2:
            found.append(f"weights: {weights}")
        if row["arm"] == "ours":
            said = [digest for digests in row["digests"].values() for digest in digests]
            if len(set(said)) != len(row["digests"]) or "None" in said:
                found.append(f"digests: {row['digests']}")
    return found


def p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]


def goals(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, bool]]:
    """Each goal's figure, and whether it is met."""
    met: dict[str, tuple[str, bool]] = {}
    ours = [fault for row in rows if row["arm"] == "ours" for fault in faults(row)]
    met["failed, cut or wrong, ours: 0"] = (str(len(ours)), not ours)
    syncs: dict[str, list[float]] = {"ours": [], "stock": []}
    for row in rows:
        if row.get("max_loras", 1) > 1:
            syncs[row["arm"]] += row["sync_s"]
    if all(syncs.values()):
        medians = {arm: statistics.median(seconds) for arm, seconds in syncs.items()}
        ratio = medians["ours"] / medians["stock"]
        text = f"{ratio:.2f} ({medians['ours']:.3f} s, {medians['stock']:.3f} s; {len(syncs['ours'])} syncs)"
        met[f"a sync, ours / stock, median: at most {SYNC_GOAL}"] = (text, ratio <= SYNC_GOAL)
    for row in rows:
        for kind in ("idle_s", "in_use_s"):
            if row.get(kind):
                text = f"{1000 * p99(row[kind]):.1f} ms (median {1000 * statistics.median(row[kind]):.1f})"
                is_met = row["arm"] == "stock" or p99(row[kind]) <= UNLOAD_GOAL_S
                met[f"p99 of an unload beside eight streams, {kind[:-2]}, {row['arm']}: at most 20 ms"] = text, is_met
    return met


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="RL frameworks' own programs", title_justify="left")
    for heading in ("program", "arm", "settings", "rollouts", "sync", "unload", "weights", "wrong"):
        table.add_column(heading)
    for row in rows:
        settings = ", ".join(f"{key} {row[key]}" for key in ("max_staleness", "max_loras", "preemptions") if key in row)
        rollouts, median = "", ""
        if "rollouts" in row:
            longer = f"{row['longer_than_a_version']} longer than a version"
            rollouts = f"{row['rollouts']}, {longer}, {row['ended_after_their_unload']} ended after their unload"
            median = f"{statistics.median(row['sync_s']):.3f} s" if row["sync_s"] else ""
        unload = row.get("unload_s") or [*row.get("idle_s", ()), *row.get("in_use_s", ())] or ""
        longest = f"{max(unload) if isinstance(unload, list) else unload} s" if unload else ""
        wrong = "; ".join(faults(row))[:300]
        weights = str(row.get("weights", "")).strip("{}").replace("'", "")
        table.add_row(row["program"], row["arm"], settings, rollouts, median, longest, weights, wrong)
    Console(width=200).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help="trl, clients, verl")
    parser.add_argument("--arms", default="ours,stock")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would outlive a time limit
    began, arms = time.monotonic(), options.arms.split(",")
    try:
        frameworks()
        base = real_model(print)
    except (NoFrameworks, NoRealModel) as error:
        print(error)
        return 1
    parts = options.parts or ["trl", "clients", "verl"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="frameworks-") as folder:
        home = Path(folder)
        versions = prepare_versions(prepare())
        for part in parts:
            made = {
                "trl": lambda: trl(arms, base, home / "trl", options.steps),
                "clients": lambda: clients(arms, versions, home / "clients"),
                "verl": lambda: verl(arms, versions, home / "verl"),
            }[part]()
            for row in made:
                rows.append(row)
                print(json.dumps({**row, "faults": faults(row)})[:1500], flush=True)
    show(rows)
    of_goals = goals(rows)
    for goal, (figure, is_met) in of_goals.items():
        print(f"{'met   ' if is_met else 'MISSED'} {goal}: {figure}")
    took_s = round(time.monotonic() - began, 1)
    if parts == ["trl", "clients", "verl"] and set(arms) == set(PLUGINS) and not ON_V2:
        plain = {goal: {"figure": figure, "is_met": is_met} for goal, (figure, is_met) in of_goals.items()}
        keep("frameworks", rows, frameworks=FRAMEWORKS, goals=plain, took_s=took_s, load=os.getloadavg())
    print(f"{took_s} s")
    return int(not all(is_met for _, is_met in of_goals.values()))


if __name__ == "__main__":
    sys.exit(main())
