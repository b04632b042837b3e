"""The stall figure for the README."""

from __future__ import annotations

from pathlib import Path

from benchmarks.manager.arms import NAMES
from benchmarks.manager.stall import KINDS, summary

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
_COLOURS = {"vllm": "#b0413e", "vllm+kernels": "#d9a441", "ours": "#7fa7c9", "ours+kernels": "#2f6690"}


def stall(rows: list[dict]) -> Path:
    """Draw docs/images/stall.svg: the largest and the p99 gap of running streams while cold adapters arrive."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "stall"  # the same rows give the same file
    sizes = sorted({row["size_mb"] for row in rows})
    arms = [arm for arm in NAMES if any(row["arm"] == arm for row in rows)]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for axis, key, title in zip(axes, ("p99", "max"), ("p99 gap", "largest gap"), strict=True):
        for number, arm in enumerate(arms):
            wide = 0.8 / len(arms)
            for at, size_mb in enumerate(sizes):
                some = [row for row in rows if (row["arm"], row["size_mb"]) == (arm, size_mb)]
                if not some:
                    continue
                x = at + (number - (len(arms) - 1) / 2) * wide
                cold, resident = (summary([r for r in some if r["kind"] == kind])[key] for kind in KINDS[:2])
                label = NAMES[arm] if at == 0 else None
                axis.bar(x, cold, wide * 0.92, color=_COLOURS[arm], label=label)
                axis.text(x, cold * 1.05, f"{cold:.1f}", ha="center", fontsize=7)
                note = "the same request, adapter resident" if number == at == 0 else None
                axis.plot([x - wide * 0.46, x + wide * 0.46], [resident] * 2, color="black", lw=1, label=note)
        axis.axhline(1, color="grey", lw=0.6)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(sizes)), [f"{size_mb} MB" for size_mb in sizes])
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("× the undisturbed median")
    axes[0].legend(frameon=False, fontsize=7)
    path = IMAGES / "stall.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
