"""Adapters of all linear layers for a base model that `testbed.models.build_base` wrote, made without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np


def write_adapter(
    directory: Path, base: Path, rank: int, draw: Callable[[tuple[int, int]], np.ndarray], *, lora_alpha: int
) -> None:
    """Write a float32 adapter; `draw` gives each matrix of a shape, layer by layer and A before B."""
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
    header: dict[str, dict] = {}
    offset, blobs = 0, []
    for layer in range(config["num_hidden_layers"]):
        for module, (wide, high) in shapes.items():
            for side, shape in (("A", (rank, wide)), ("B", (high, rank))):
                data = draw(shape).tobytes()
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"
                header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
                offset += len(data)
                blobs.append(data)
    directory.mkdir(parents=True)
    raw = json.dumps(header).encode()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.writelines(blobs)
    adapter_config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": lora_alpha,
        "target_modules": sorted({module.split(".")[1] for module in shapes}),
        "base_model_name_or_path": str(base),
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config))
