"""The base model and the adapters that the benchmarks serve, made once and kept in `.cache/`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np

from testbed.models import build_base

HIDDEN, LAYERS = 1024, 36  # 340 M parameters, 1.4 GB in float32
RANKS = {40: 16, 150: 64, 600: 256}  # by the adapter's size in MB: 2.36 MB of float32 for each rank
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "bench-manager"


def base_model(hidden: int = HIDDEN, layers: int = LAYERS) -> Path:
    """A random float32 Llama, grouped-query attention, `intermediate = 2 * hidden`."""
    home = CACHE / f"base-{hidden}x{layers}"
    if not home.exists():
        unfinished = home.with_name(f"{home.name}.{os.getpid()}")
        build_base(unfinished, hidden=hidden, layers=layers)
        os.replace(unfinished, home)
    return home


def adapter(base: Path, rank: int) -> Path:
    """A random float32 adapter of all linear layers of `base`; random answers, the right amount of work."""
    home = CACHE / f"adapter-{base.name}-r{rank}"
    if not home.exists():
        unfinished = home.with_name(f"{home.name}.{os.getpid()}")
        _write(unfinished, base, rank)
        os.replace(unfinished, home)
    return home


def link(source: Path, directory: Path) -> Path:
    """The same bytes as another adapter: to vLLM, what counts is the path."""
    directory.mkdir(parents=True)
    shutil.copy(source / "adapter_config.json", directory)
    os.link(source / "adapter_model.safetensors", directory / "adapter_model.safetensors")
    return directory


def size_bytes(directory: Path) -> int:
    return (directory / "adapter_model.safetensors").stat().st_size


def warm_page_cache(directory: Path) -> None:
    with (directory / "adapter_model.safetensors").open("rb", buffering=0) as file:
        block = bytearray(1 << 22)
        while file.readinto(block):
            pass


def drop_page_cache(directory: Path) -> None:
    """Have the next read come from the disk."""
    with (directory / "adapter_model.safetensors").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write(directory: Path, base: Path, rank: int) -> None:
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
    random = np.random.default_rng(rank)
    header: dict[str, dict] = {}
    offset, blobs = 0, []
    for layer in range(config["num_hidden_layers"]):
        for module, (wide, high) in shapes.items():
            for side, shape in (("A", (rank, wide)), ("B", (high, rank))):
                data = ((random.random(shape, np.float32) - 0.5) * 0.002).tobytes()
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
        "lora_alpha": 2 * rank,  # a scaling that has to be folded in, as almost every adapter's
        "target_modules": sorted({module.split(".")[1] for module in shapes}),
        "base_model_name_or_path": str(base),
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config))
