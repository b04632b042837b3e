"""Adapters that several benchmarks serve, made without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

ITEM_BYTES = {"F32": 4, "BF16": 2}
_RANK, _HIDDEN = 64, 4096


def write_adapter(
    directory: Path,
    modules: Mapping[str, tuple[int, int]],
    rank: int,
    draw: Callable[[tuple[int, int]], np.ndarray],
    *,
    dtype: str = "F32",
    lora_alpha: int = 16,
    base: str = "",
) -> None:
    """Write an adapter of modules with so many inputs and outputs; `draw` gives each matrix, A before B."""
    header: dict[str, dict] = {}
    end = 0
    for module, (wide, high) in modules.items():
        for side, shape in (("A", (rank, wide)), ("B", (high, rank))):
            begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            header[f"base_model.model.{module}.lora_{side}.weight"] = entry
    directory.mkdir(parents=True, exist_ok=True)
    raw = json.dumps(header).encode()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for entry in header.values():
            file.write(draw(entry["shape"]).data)
    targets = sorted({module.rpartition(".")[2] for module in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": lora_alpha, "target_modules": targets}
    config |= {"base_model_name_or_path": base} if base else {}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def of_linear_layers(base: Path) -> dict[str, tuple[int, int]]:
    """All linear layers of a model that `testbed.models.build_base` wrote."""
    config = json.loads((base / "config.json").read_text())
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{layer}.{module}": shape for layer in layers for module, shape in shapes.items()}


def write_sized_adapter(directory: Path, size_mb: int, dtype: str) -> None:
    """A Llama-8B-like adapter of about this size."""
    count = max(1, round(size_mb * 1e6 / (2 * _RANK * _HIDDEN * ITEM_BYTES[dtype])))
    modules = [f"model.layers.{index // 4}.self_attn.{'qkvo'[index % 4]}_proj" for index in range(count)]
    piece = np.random.default_rng(0).integers(0, 0x3F, _RANK * _HIDDEN * ITEM_BYTES[dtype], dtype=np.uint8)
    write_adapter(directory, dict.fromkeys(modules, (_HIDDEN, _HIDDEN)), _RANK, lambda _: piece, dtype=dtype)


def write_random_adapter(directory: Path, base: Path, rank: int, seed: int = 0) -> None:
    """A float32 adapter of all linear layers of `base`: random answers, the right amount of work."""
    random = np.random.default_rng(seed)
    write_adapter(
        directory,
        of_linear_layers(base),
        rank,
        lambda shape: random.standard_normal(shape, np.float32) * 0.001,
        lora_alpha=2 * rank,  # a scaling that has to be folded in, as almost every adapter's
        base=str(base),
    )
