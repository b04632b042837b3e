"""Goal of R54 and R66 (docs/benchmarks/real.md#served-as-trained).

Served logarithms of probabilities against PEFT's, by `lora-plugins compare`, for each trained adapter.

In multiples of the noise floor: how far the served base model is from PEFT's. The same adapters on vLLM without us.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.processors import bfloat16_instructions
from benchmarks.real.bed import MAX_RANK, NAME, OURS, SHIPPED, STOCK, TRAINED, Bed, Figure
from lora_plugins.cli.at_fault import ByPeft
from lora_plugins.cli.compare import OK, PROMPTS
from lora_plugins.kernels.processor import this_processor

SLOTS = ("--max-loras", "4", "--max-cpu-loras", "8", "--max-lora-rank", str(MAX_RANK))
_QUICK = 2  # adapters


def measure(bed: Bed, rows: list[dict]) -> None:
    names = TRAINED[:_QUICK] if bed.is_quick else TRAINED
    bed.adapters(len(TRAINED))
    trained = {name: _trained(bed, name) for name in names}
    for dtype in ("float32", "bfloat16"):
        if dtype == "bfloat16" and bfloat16_instructions(this_processor()) is None:
            rows.append({"dtype": dtype, "left_out": "no AVX-512 BF16 and no AMX here"})
            continue
        with bed.servers([OURS, STOCK], "--dtype", dtype, *SLOTS) as arms:
            for arm in arms:
                for name in names:
                    found = _compared(arm.port, name, trained[name])
                    rows.append({"dtype": dtype, "arm": arm.name, "adapter": name, **found})


def _trained(bed: Bed, name: str) -> Path:
    """What PEFT computes, as a trainer's file: PEFT's process ends before servers start."""
    path = bed.home / f"{name}.jsonl"
    model = ByPeft(SHIPPED / name, str(bed.base))
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in map(model.trained, PROMPTS)))
    return path


def _compared(port: int, name: str, trained: Path) -> dict:
    command = [str(Path(sys.executable).with_name("lora-plugins")), "compare", name, "--json"]
    command += ["--trainer", str(trained), "--url", f"http://127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    try:
        said = json.loads(done.stdout)
        prompts = said["prompts"]
        return {
            "verdict": said["verdict"],
            "floor": said["floor"],
            "largest": max(one["largest"] for one in prompts),
            "mean": max(one["mean"] for one in prompts),
        }
    except (ValueError, KeyError):
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-1000:]}") from None


def figures(rows: list[dict]) -> list[Figure]:
    found = [Figure(f"{row['dtype']}, {NAME}", "left out", row["left_out"]) for row in rows if "left_out" in row]
    for dtype, arm in dict.fromkeys((row["dtype"], row["arm"]) for row in rows if "arm" in row):
        some = [row for row in rows if row.get("arm") == arm and row["dtype"] == dtype]
        right, floor = sum(row["verdict"] == OK for row in some), max(row["floor"]["largest"] for row in some)
        spread, goal = f"{right} of {len(some)} as trained, floor {floor:.1e}", "≤ 5, all" if arm == OURS else ""
        value = f"{max(row['largest'] for row in some):.2f}"
        is_met = right == len(some) if goal else None
        found.append(Figure(f"{dtype}, {arm}: largest distance, in floors", value, spread, goal, is_met))
    return found
