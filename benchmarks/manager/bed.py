"""The base model and the adapters that the benchmarks serve, made once and kept in `.cache/`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from benchmarks.adapters import of_linear_layers, write_adapter
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
    random = np.random.default_rng(rank)
    write_adapter(
        directory,
        of_linear_layers(base),
        rank,
        lambda shape: (random.random(shape, np.float32) - 0.5) * 0.002,
        lora_alpha=2 * rank,  # a scaling that has to be folded in, as almost every adapter's
        base=str(base),
    )
