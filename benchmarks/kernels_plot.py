"""Draw docs/images/kernels_cpu.svg from what `benchmarks.kernels_cpu` kept."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kernels_cpu import GOALS, SLOT_RANKS, ratio
from benchmarks.record import IMAGES

CASES = {"one16": "one adapter of rank 16", "four16": "four adapters of rank 16", "four64": "four adapters of rank 64"}
COLOURS = {"vllm": "#b8b8b8", "ours": "#2a6f97"}
NAMES = {"vllm": "vLLM's kernels", "ours": "lora_kernels"}


def plot(rows: list[dict]) -> Path:
    """One panel per case: tokens/s relative to the base model's, by `max_lora_rank`."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "kernels"  # the same rows give the same file
    figure, axes = plt.subplots(1, len(CASES), figsize=(10, 3.9), sharey=True, layout="constrained")
    for axis, (case, title) in zip(axes, CASES.items(), strict=True):
        ranks = [rank for rank in SLOT_RANKS if case != "four64" or rank >= 64]
        for at, kernels in enumerate(NAMES):
            shares = [ratio(rows, kernels, rank, case, "both") for rank in ranks]
            places = [number + (at - 0.5) * 0.4 for number in range(len(ranks))]
            bars = axis.bar(
                places, [100 * (share or 0) for share in shares], 0.38, color=COLOURS[kernels], label=NAMES[kernels]
            )
            labels = ["not done\nin 7 min" if share is None else f"{share:.0%}" for share in shares]
            axis.bar_label(bars, labels, fontsize=7.5, padding=2)
        axis.axhline(100 * GOALS[case], color="#c1121f", linewidth=0.8, linestyle="--", label="goal of lora_kernels")
        axis.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("--max-lora-rank of the server")
        axis.set_ylim(0, 112)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("tokens/s, % of the base model's")
    figure.suptitle("Throughput with adapters on the CPU, relative to the base model in the same engine", fontsize=11)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    path = IMAGES / "kernels_cpu.svg"
    figure.savefig(path, metadata={"Date": None, "Title": "Tokens/s with adapters, relative to the base model's"})
    return path
