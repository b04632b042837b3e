"""Goal of R30, and the figure of README and docs/explanation/kernels.md#measured: `make bench-kernels-cpu`.

What adapters cost on the CPU: tokens/s with adapters against the base model, vLLM's kernels and ours.

A 95 M-parameter Llama on the real engine, offline, in float32 unless `--dtype` names others. Each engine (one per
dtype, kernels and `max_lora_rank`) runs in a separate process, placed on the cores by vLLM as for `vllm serve`, and
measures base and adapters in turn, round after round. A figure is the fastest round's tokens/s, relative to the base
model's in the same engine. Prints Markdown, keeps benchmarks/results/kernels_cpu.json. An engine gets `--limit-s`; one
that does not get through is reported as such.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.adapters import write_random_adapter
from benchmarks.plots import GOAL, OURS, drawing
from benchmarks.record import RESULTS, bfloat16_instructions, keep
from lora_plugins.kernels.processor import this_processor
from testbed.models import build_base
from testbed.server import outer_environment

HIDDEN, LAYERS, INTERMEDIATE, VOCAB = 1024, 8, 2816, 512
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 16, 64, 32
SLOT_RANKS = (16, 64, 256)
DTYPES = ("float32", "bfloat16", "float16")
PARTS = {"both": (PROMPT_TOKENS, NEW_TOKENS), "prefill": (PROMPT_TOKENS, 1), "decode": (1, NEW_TOKENS)}
CHOICES = {"ours": "cpu"}  # of LORA_PLUGINS_KERNELS
ADAPTERS = {16: SEQUENCES, 64: 4}  # of each rank
GOALS = {"one16": 0.95, "four16": 0.92, "sixteen16": 0.90, "four64": 0.85}


def cases(slot_rank: int) -> dict[str, list[str]]:
    """Adapters of each case, dealt to the sequences in turn; none for the base model."""
    result = {"base": [], "one16": ["r16-0"], "four16": [f"r16-{n}" for n in range(4)]}
    result["sixteen16"] = [f"r16-{n}" for n in range(16)]
    if slot_rank >= 64:
        result["four64"] = [f"r64-{n}" for n in range(4)]
    return result


def started(home: Path, slot_rank: int, dtype: str) -> Callable[[list[str], str], float]:
    """In the child: start the engine; returns a function that runs a part with adapters and returns the seconds."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        str(home / "base"),
        dtype=dtype,
        enforce_eager=True,
        enable_lora=slot_rank > 0,
        max_loras=SEQUENCES,
        max_cpu_loras=sum(ADAPTERS.values()),
        max_lora_rank=slot_rank or 16,
        max_model_len=256,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=SEQUENCES * PROMPT_TOKENS,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    names = sorted(path.name for path in home.glob("r*-*"))
    generator = random.Random(0)

    def run(adapters: list[str], part: str) -> float:
        prompt_tokens, new_tokens = PARTS[part]
        prompts = [
            {"prompt_token_ids": [generator.randrange(10, VOCAB - 10) for _ in range(prompt_tokens)]}
            for _ in range(SEQUENCES)
        ]
        chosen = [adapters[n % len(adapters)] for n in range(SEQUENCES)] if adapters else []
        requests = [LoRARequest(name, names.index(name) + 1, str(home / name)) for name in chosen] or None
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
        elapsed = time.perf_counter() - start
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == SEQUENCES * new_tokens
        return elapsed

    return run


def measure(home: Path, slot_rank: int, rounds: int, dtype: str) -> None:
    """In the child: run every case in turn and print one JSON line for each."""
    run = started(home, slot_rank, dtype)
    todo = cases(slot_rank) if slot_rank else {"base": []}
    for adapters in todo.values():
        run(adapters, "decode")  # the first use loads adapters and fills caches
    for number in range(rounds):
        order = list(todo) if number % 2 == 0 else list(todo)[::-1]
        for case in order:
            run(todo[case], "decode")  # adapters of the case before may have to make room
            for part in PARTS:
                row = {"case": case, "part": part, "round": number, "seconds": run(todo[case], part)}
                row["load"] = os.getloadavg()[0]  # above 2 or 3, others were using the cores
                print(json.dumps(row), flush=True)


def environment_of(kernels: str) -> dict[str, str]:
    return {
        **outer_environment(),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "lora_kernels" if kernels in CHOICES else "",
        **({"LORA_PLUGINS_KERNELS": CHOICES[kernels]} if kernels in CHOICES else {}),
    }


def run_engine(home: Path, kernels: str, slot_rank: int, rounds: int, limit_s: float, dtype: str) -> list[dict]:
    """Measure in a child process; what it printed within the limit."""
    command = [sys.executable, "-m", "benchmarks.kernels_cpu", "--child", str(home), "--slot-ranks", str(slot_rank)]
    command += ["--rounds", str(rounds), "--dtype", dtype]
    with (home / f"{kernels}-{slot_rank}.log").open("wb") as log, tempfile.TemporaryFile() as out:
        child = subprocess.Popen(command, stdout=out, stderr=log, env=environment_of(kernels), start_new_session=True)
        finished = True
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            finished = False
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        rows = [json.loads(line) for line in out.read().decode().splitlines() if line.startswith('{"case"')]
    if finished and child.returncode:
        raise RuntimeError((home / f"{kernels}-{slot_rank}.log").read_text()[-4000:])
    return [{"kernels": kernels, "slot_rank": slot_rank, "finished": finished, **row} for row in rows]


def fastest(rows: list[dict], kernels: str, slot_rank: int, case: str, part: str) -> float | None:
    """Seconds of the fastest round: what else runs on the machine only ever adds."""
    wanted = (kernels, slot_rank, case, part)
    return min(
        (row["seconds"] for row in rows if (row["kernels"], row["slot_rank"], row["case"], row["part"]) == wanted),
        default=None,
    )


def ratio(rows: list[dict], kernels: str, slot_rank: int, case: str, part: str) -> float | None:
    """Tokens/s relative to the base model's in the same engine."""
    base, mine = (fastest(rows, kernels, slot_rank, name, part) for name in ("base", case))
    return None if base is None or mine is None else base / mine


def paired(rows: list[dict], kernels: str, slot_rank: int, case: str) -> list[float]:
    """As `ratio` of both parts together, but of each round by itself, ascending."""
    seconds = {
        (row["case"], row["round"]): row["seconds"]
        for row in rows
        if (row["kernels"], row["slot_rank"], row["part"]) == (kernels, slot_rank, "both")
    }
    return sorted(
        seconds["base", n] / taken for (of, n), taken in seconds.items() if of == case and ("base", n) in seconds
    )


def tokens_per_s(rows: list[dict], kernels: str, slot_rank: int, case: str, part: str) -> float | None:
    seconds = fastest(rows, kernels, slot_rank, case, part)
    prompt_tokens, new_tokens = PARTS[part]
    tokens = prompt_tokens if part == "prefill" else new_tokens
    return SEQUENCES * tokens / seconds if seconds else None


def instructions(dtype: str) -> str | None:
    """What a reader of bfloat16 results has to know of the machine."""
    if dtype != "bfloat16":
        return None
    found = bfloat16_instructions(this_processor())
    return f"multiplied by {found}" if found else "no AVX-512 BF16 and no AMX, so the goals cannot be judged"


def result_name(dtype: str) -> str:
    return "kernels_cpu" if dtype == "float32" else f"kernels_cpu_{dtype}"


def kept(name: str) -> list[dict]:
    """What an earlier run measured; engines may be measured one at a time."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def print_table(rows: list[dict], slot_ranks: list[int]) -> None:
    def cell(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    base = [
        tokens_per_s(rows, kernels, rank, "base", "both") for kernels in (*CHOICES, "none") for rank in (0, *slot_ranks)
    ]
    print("new tokens/s of the base model, engine by engine:", ", ".join(cell(b, ".0f") for b in base if b))
    print("largest load that ours met:", max((row["load"] for row in rows if row["kernels"] == "ours"), default="–"))
    print()
    print(
        "| kernels | `max_lora_rank` | adapters | tokens/s | of base | prefill alone | decode alone | goal "
        "| round by round: median (all) |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for kernels in ("vllm", "ours"):
        for rank in slot_ranks:
            for case in list(cases(rank))[1:]:
                if not any(row["kernels"] == kernels and row["slot_rank"] == rank for row in rows):
                    continue
                speed = cell(tokens_per_s(rows, kernels, rank, case, "both"), ".0f")
                parts = [cell(ratio(rows, kernels, rank, case, part), ".1%") for part in PARTS]
                each = paired(rows, kernels, rank, case)
                rounds = f"{statistics.median(each):.1%} ({each[0]:.0%} to {each[-1]:.0%})" if each else "–"
                goal = f"{GOALS[case]:.0%}" if kernels == "ours" else ""
                print(f"| {kernels} | {rank} | {case} | {speed} | {' | '.join(parts)} | {goal} | {rounds} |")


def draw(rows: list[dict]) -> None:
    """One panel per case: tokens/s relative to the base model's, by `max_lora_rank`."""
    panels = {
        "one16": "one adapter of rank 16",
        "four16": "four adapters of rank 16",
        "four64": "four adapters of rank 64",
    }
    kinds = {"vllm": ("vLLM's kernels", "#b8b8b8"), "ours": ("lora_kernels", OURS)}
    title = "Tokens/s with adapters, relative to the base model's"
    with drawing("kernels_cpu", title, ncols=len(panels), figsize=(10, 3.9), sharey=True) as (figure, axes):
        for axis, (case, of_case) in zip(axes, panels.items(), strict=True):
            ranks = [rank for rank in SLOT_RANKS if case != "four64" or rank >= 64]
            for at, (kind, (label, colour)) in enumerate(kinds.items()):
                shares = [ratio(rows, kind, rank, case, "both") for rank in ranks]
                places = [number + (at - 0.5) * 0.4 for number in range(len(ranks))]
                bars = axis.bar(places, [100 * (share or 0) for share in shares], 0.38, color=colour, label=label)
                labels = ["not done\nin 7 min" if share is None else f"{share:.0%}" for share in shares]
                axis.bar_label(bars, labels, fontsize=7.5, padding=2)
            axis.axhline(100 * GOALS[case], color=GOAL, linewidth=0.8, linestyle="--", label="goal of lora_kernels")
            axis.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
            axis.set_title(of_case, fontsize=10)
            axis.set_xlabel("--max-lora-rank of the server")
            axis.set_ylim(0, 112)
        axes[0].set_ylabel("tokens/s, % of the base model's")
        figure.suptitle(
            "Throughput with adapters on the CPU, relative to the base model in the same engine", fontsize=11
        )
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
        )


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--child", type=Path)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--slot-ranks", type=int, nargs="*", default=list(SLOT_RANKS))
    arguments.add_argument("--kernels", nargs="*", default=["none", "ours", "vllm"])
    arguments.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    arguments.add_argument("--limit-s", type=float, default=240)
    arguments.add_argument("--dry", action="store_true", help="keep no result")
    arguments.add_argument("--fresh", action="store_true", help="without what earlier runs measured of other engines")
    options = arguments.parse_args()
    if options.child:
        measure(options.child, options.slot_ranks[0], options.rounds, options.dtype[0])
        return 0
    for dtype in options.dtype:
        if instructions(dtype):
            print(f"{dtype} here: {instructions(dtype)}.\n")
        run(options, dtype)
    return 0


def run(options: argparse.Namespace, dtype: str) -> None:
    """Measure one dtype's engines, print their table, and keep them."""
    result = result_name(dtype)
    rows = [] if options.fresh else kept(result)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        base = build_base(home / "base", hidden=HIDDEN, layers=LAYERS, vocab=VOCAB, intermediate=INTERMEDIATE)
        for rank, count in ADAPTERS.items():
            for number in range(count):
                write_random_adapter(home / f"r{rank}-{number}", base, rank, number)
        for kernels in options.kernels:
            for slot_rank in (0,) if kernels == "none" else options.slot_ranks:
                found = run_engine(home, kernels, slot_rank, options.rounds, options.limit_s, dtype)
                rows = [row for row in rows if (row["kernels"], row["slot_rank"]) != (kernels, slot_rank)]
                rows += found or [{"kernels": kernels, "slot_rank": slot_rank, "finished": False}]
                print(f"{kernels}, max_lora_rank {slot_rank}: {len(found)} measurements", file=sys.stderr, flush=True)
    print_table([row for row in rows if "case" in row], list(SLOT_RANKS))
    for kernels, rank in sorted({(row["kernels"], row["slot_rank"]) for row in rows if not row["finished"]}):
        count = sum((row["kernels"], row["slot_rank"]) == (kernels, rank) and "case" in row for row in rows)
        print(f"\n{kernels} at {rank} did not get through: {count} measurements in {options.limit_s:.0f} s.")
    if not options.dry:
        print(f"\nRaw: {keep(result, rows, **{'bfloat16': instructions(dtype)} if instructions(dtype) else {}).name}")
        if result == result_name("float32"):
            draw([row for row in rows if "case" in row])


if __name__ == "__main__":
    sys.exit(main())
