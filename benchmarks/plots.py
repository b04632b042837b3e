"""Draws the plots of docs/images from what is kept in benchmarks/results: `python -m benchmarks.plots`.

`kernels_cpu` (README, kernels.md), `stall` (manager.md), `routing` (routing.md).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.record import IMAGES, RESULTS

GOAL, OURS, OTHER, BLUE, GREY = "#c1121f", "#2a6f97", "#c98a1b", "#2f6690", "#b8c4cc"


@contextmanager
def drawing(name: str, title: str, **panels: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, which are docs/images/<name>.svg afterwards; the same rows give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = name.partition("_")[0]
    figure, axes = plt.subplots(layout="constrained", **panels)
    yield figure, axes
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path_of(name), metadata={"Date": None, "Title": title})
    plt.close(figure)


def path_of(name: str) -> Path:
    return IMAGES / f"{name}.svg"


def kernels_cpu(rows: list[dict]) -> None:
    """One panel per case: tokens/s relative to the base model's, by `max_lora_rank`."""
    from benchmarks.kernels_cpu import GOALS, SLOT_RANKS, ratio

    cases = {
        "one16": "one adapter of rank 16",
        "four16": "four adapters of rank 16",
        "four64": "four adapters of rank 64",
    }
    kinds = {"vllm": ("vLLM's kernels", "#b8b8b8"), "ours": ("lora_kernels", OURS)}
    title = "Tokens/s with adapters, relative to the base model's"
    with drawing("kernels_cpu", title, ncols=len(cases), figsize=(10, 3.9), sharey=True) as (figure, axes):
        for axis, (case, of_case) in zip(axes, cases.items(), strict=True):
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


def stall(rows: list[dict]) -> None:
    """Each cold adapter's largest gap between tokens of running streams."""
    arms = {"vllm+kernels": ("vLLM's manager", OTHER), "ours+kernels": ("lora_lru_manager", OURS)}
    sizes = sorted({row["size_mb"] for row in rows})
    with drawing("stall", "Largest gap between tokens while cold adapters arrive", figsize=(8, 3.6)) as (_, axis):
        for number, (arm, (name, colour)) in enumerate(arms.items()):
            for at, size_mb in enumerate(sizes):
                some = [row for row in rows if (row["arm"], row["size_mb"], row["kind"]) == (arm, size_mb, "cold")]
                if not some:
                    continue
                largest = [max(row["gaps_ms"]) / row["quiet_median_ms"] for row in some]
                x, median = at + (number - 0.5) * 0.4, statistics.median(largest)
                label = name if at == 0 else None
                axis.bar(x, median, 0.36, color=colour, alpha=0.45, label=label and f"{label}: median")
                spread = [x + 0.22 * (place / max(len(largest) - 1, 1) - 0.5) for place in range(len(largest))]
                axis.scatter(spread, largest, s=14, color=colour, label=label and f"{label}: each arrival")
                axis.text(x, 0.35, f"{median:.2f}×", ha="center", fontsize=9)
        axis.axhline(1, color="grey", lw=0.8, ls="--", label="undisturbed")
        axis.set_title("Running streams while a cold adapter arrives: largest gap between two tokens", fontsize=11)
        axis.set_xticks(range(len(sizes)), [f"{size_mb} MB" for size_mb in sizes])
        axis.set_xlabel("size of the adapter that arrives")
        axis.set_ylabel("× the undisturbed median gap")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8, loc="upper left")


def routing(rows: dict[str, Any]) -> None:
    """Cold starts, imbalance and the time of a decision, by policy."""
    found = rows["policies"]
    panels = (
        ("requests that load their adapter", "% of requests", [it["cold_rate"] * 100 for it in found], "{:.1f} %"),
        ("load imbalance", "p99 / mean requests in flight", [it["imbalance"] for it in found], "{:.2f}"),
        ("time of a decision, p99", "µs of CPU, logarithmic", [it["decide_p99_us"] for it in found], "{:.0f}"),
    )
    names = [it["policy"] for it in found]
    with drawing("routing", "Routing policies compared", ncols=3, figsize=(10, 2.9), sharey=True) as (figure, axes):
        for axis, (title, label, values, shape) in zip(axes, panels, strict=True):
            bars = axis.barh(names, values, color=[BLUE if name == "affinity" else GREY for name in names])
            axis.bar_label(bars, [" " + shape.format(value) for value in values], fontsize=8)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel(label, fontsize=8)
            axis.set_xlim(right=max(values) * 1.3)
        axes[2].set_xscale("log")
        axes[2].set_xlim(1, max(panels[2][2]) * 6)
        axes[2].axvline(50, color="grey", lw=0.8, ls="--", label="50 µs")
        axes[2].legend(frameon=False, fontsize=8, loc="lower right")
        axes[0].invert_yaxis()
        axes[0].set_ylabel("policy", fontsize=8)
        many, replicas, places = (rows[name] for name in ("ADAPTERS", "REPLICAS", "PLACES"))
        figure.suptitle(f"{many:,} adapters on {replicas:,} replicas with room for {places} each", fontsize=11)


def main() -> None:
    for draw in (kernels_cpu, stall, routing):
        rows = json.loads((RESULTS / f"{draw.__name__}.json").read_text())["rows"]
        draw([row for row in rows if "case" in row] if draw is kernels_cpu else rows)
        print(path_of(draw.__name__).name)


if __name__ == "__main__":
    main()
