"""Adapters that must not be served: how each is made from a good one, and what the client is told."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from testbed.models import edit_config

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Broken:
    """`make(directory)` spoils a copy of a good adapter; `texts` must all stand in the error."""

    name: str
    make: Callable[[Path], None]
    status: int
    texts: tuple[str, ...]


def _write(file: str, data: str) -> Callable[[Path], None]:
    return lambda directory: (directory / file).write_text(data) and None


def _remove(file: str) -> Callable[[Path], None]:
    return lambda directory: (directory / file).unlink()


def _config(**changes: object) -> Callable[[Path], None]:
    return lambda directory: edit_config(directory, **changes)


def _tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return make


def _truncate(directory: Path) -> None:
    path = directory / WEIGHTS
    os.truncate(path, path.stat().st_size - 1000)


def _pickle(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")


def _widen(tensors: dict[str, np.ndarray]) -> None:
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    tensors[name] = np.zeros((tensors[name].shape[0], tensors[name].shape[1] + 8), np.float32)


def _poison(tensors: dict[str, np.ndarray]) -> None:
    name = next(iter(tensors))
    tensors[name][-1, -1] = np.nan


def _rename(old: str, new: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


BROKEN = (
    Broken("broken-json", _write(CONFIG, '{"peft_type": "LORA", '), 400, ("L005", CONFIG, "JSON", "To fix")),
    Broken("json-array", _write(CONFIG, "[1]"), 400, ("L005", CONFIG, "object")),
    Broken("missing-key", _config(r=...), 400, ("L005", CONFIG, "'r'")),
    Broken("bad-alpha", _config(lora_alpha=0), 400, ("L005", CONFIG, "lora_alpha 0", "without effect")),
    Broken("missing-weights", _remove(WEIGHTS), 404, ("L002", WEIGHTS)),
    Broken("missing-config", _remove(CONFIG), 404, ("L002", CONFIG)),
    Broken("truncated", _truncate, 400, ("L005", WEIGHTS, "bytes")),
    Broken("empty-weights", _write(WEIGHTS, ""), 400, ("L005", WEIGHTS)),
    Broken("pickle", _pickle, 400, ("L005", "adapter_model.bin", "LORA_PLUGINS_ALLOW_PICKLE")),
    Broken("nan", _tensors(_poison), 400, ("L005", WEIGHTS, "NaN")),
    Broken("wrong-rank", _config(r=4), 400, ("L005", "rank 8", "rank 4")),
    Broken("qalora", _config(use_qalora=True), 400, ("L003", CONFIG, "QALoRA")),
    Broken("pissa", _config(init_lora_weights="pissa"), 400, ("L003", CONFIG, "pissa")),
    Broken("not-lora", _config(peft_type="LOHA"), 400, ("L003", CONFIG, "LOHA")),
    Broken("wrong-shapes", _tensors(_widen), 400, ("L003", WEIGHTS, "264 inputs", "256 inputs and 256 outputs")),
    Broken("no-such-module", _tensors(_rename("q_proj", "query")), 400, ("L003", WEIGHTS, "query", "such as")),
    Broken(
        "another-prefix",
        _tensors(_rename("model.model.", "model.model.language_model.")),
        400,
        ("L003", WEIGHTS, "language_model"),
    ),
    Broken(
        "compiled",
        _tensors(_rename("base_model.model.", "base_model.model._orig_mod.encoder.")),
        400,
        ("L003", WEIGHTS, "_orig_mod", "torch.compile"),
    ),
    Broken(
        "half-of-another-model", _tensors(_rename("layers.1.", "h.1.")), 400, ("L003", WEIGHTS, "h.1.", "UNMATCHED")
    ),
    Broken("no-such-layer", _tensors(_rename("layers.1.", "layers.99.")), 400, ("L003", WEIGHTS, "layers.99.")),
)


# Ways to spell the path of an adapter that lies beside the root, and second spellings of one inside it.
def break_all(good: Path, root: Path) -> None:
    """Make every broken adapter below `root` from the good one."""
    for case in BROKEN:
        shutil.copytree(good, root / case.name)
        case.make(root / case.name)
