"""benchmarks/capacity.py: its table stands in the page, and the page's formula is what vLLM's own layers take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import capacity

ROOT = Path(__file__).resolve().parent.parent


def test_page_has_the_table_that_was_printed():
    rows = json.loads(capacity.KEPT.read_text())["rows"]
    assert capacity.table(rows) in (ROOT / "docs" / "operate" / "capacity.md").read_text()


def formula(config: dict[str, int], rank: int) -> tuple[int, int]:
    """Of the page: one slot, and an adapter of all linear layers; bfloat16."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    of_keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = 2 * (hidden + hidden) + 2 * (hidden + of_keys) + 3 * (hidden + inner)
    total = config["num_hidden_layers"] * layer
    return rank * (total + 2 * (config["vocab_size"] + hidden)) * 2, rank * total * 2


def test_kept_figures_are_those_of_the_formula():
    for row in json.loads(capacity.KEPT.read_text())["rows"]:
        assert (row["slot_bytes"], row["adapter_bytes"]) == formula(capacity.LLAMA_8B, row["rank"])
        assert row["slots_bytes"] == 16 * row["slot_bytes"]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_real_layers_take_what_the_formula_says(tmp_path):
    small = {
        **capacity.LLAMA_8B,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.capacity", str(path)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [dict(zip(("rank", "slot_bytes", "adapter_bytes"), (rank, *formula(small, rank)), strict=True))
            for rank in capacity.RANKS]  # fmt: skip
    wanted = capacity.table([{**row, "slots_bytes": 16 * row["slot_bytes"]} for row in rows])
    assert wanted in done.stdout
