"""The stall figure for README and docs/benchmarks/manager.md."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.record import IMAGES

ARMS = {"vllm+kernels": ("vLLM's manager", "#c98a1b"), "ours+kernels": ("lora_lru_manager", "#2a6f97")}


def stall(rows: list[dict]) -> Path:
    """Draw docs/images/stall.svg: each cold adapter's largest gap between tokens of running streams."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "stall"  # the same rows give the same file
    sizes = sorted({row["size_mb"] for row in rows})
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for number, (arm, (name, colour)) in enumerate(ARMS.items()):
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
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    path = IMAGES / "stall.svg"
    figure.savefig(path, metadata={"Date": None, "Title": "Largest gap between tokens while cold adapters arrive"})
    plt.close(figure)
    return path
