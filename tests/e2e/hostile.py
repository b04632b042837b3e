"""Adapters that are made to hurt others: what takes memory, time, threads or descriptors to refuse, or overflows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from testbed.models import edit_config
from tests.e2e.broken import BROKEN, CONFIG, WEIGHTS

INDEX = "adapter_model.safetensors.index.json"
MIB = 1 << 20
Make = Callable[[Path], object]


def _config(**changes: object) -> Make:
    return lambda directory: edit_config(directory, **changes)


def _with_text(key: str, value: str) -> Make:
    """A member of the configuration that is written as it stands here."""

    def make(directory: Path) -> None:
        text = (directory / CONFIG).read_text().rstrip().removesuffix("}")
        (directory / CONFIG).write_text(f'{text}, "{key}": {value}}}')

    return make


def _header(change: Callable[[dict[str, object]], object]) -> Make:
    """The weights of the good one, with another header."""

    def make(directory: Path) -> None:
        data = (directory / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        written = json.dumps(header).encode()
        (directory / WEIGHTS).write_bytes(len(written).to_bytes(8, "little") + written + data[8 + length :])

    return make


def _described(text: object) -> Make:
    """The first tensor is described by this."""
    return _header(lambda header: header.update({next(name for name in header if name != "__metadata__"): text}))


def _bytes(file: str, data: bytes | Callable[[], bytes]) -> Make:
    return lambda directory: (directory / file).write_bytes(data if isinstance(data, bytes) else data())


def _sparse(size_bytes: int) -> Make:
    return lambda directory: os.truncate(directory / WEIGHTS, size_bytes)


def _scaled(side: str, factor: float) -> Make:
    def make(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        save_file(
            {name: tensor * np.float32(factor) if side in name else tensor for name, tensor in tensors.items()},
            directory / WEIGHTS,
        )

    return make


def _shards(count: int, size_bytes: int = 0) -> Make:
    def make(directory: Path) -> None:
        names = list(load_file(directory / WEIGHTS))
        shards = [f"adapter_model-{number:05d}-of-{count:05d}.safetensors" for number in range(count)]
        for shard in shards:
            (directory / shard).write_bytes((directory / WEIGHTS).read_bytes() if count < 10 else b"\0" * 16)
        weight_map = {name: shards[number % count] for number, name in enumerate(names)}
        weight_map |= {f"more.{shard}": shard for shard in shards}
        index = json.dumps({"weight_map": weight_map})
        (directory / INDEX).write_text(index + " " * max(0, size_bytes - len(index)))
        (directory / WEIGHTS).unlink()

    return make


def _pipe(file: str) -> Make:
    def make(directory: Path) -> None:
        (directory / file).unlink()
        os.mkfifo(directory / file)

    return make


def _directory(file: str) -> Make:
    def make(directory: Path) -> None:
        (directory / file).unlink()
        (directory / file).mkdir()

    return make


def _link(file: str, target: str) -> Make:
    def make(directory: Path) -> None:
        (directory / file).unlink()
        (directory / file).symlink_to(target)

    return make


HOSTILE: Mapping[str, Make] = {
    "nested-counts": _config(rank_pattern={"(?:(?:(?:a+){1000}){1000}){1000}": 8}),
    "nested-pluses": _config(alpha_pattern={"(?:(?:a+)+)+$": 8}),
    "many-counts": _config(rank_pattern={"a{900}" * 300: 8}),
    "many-patterns": _config(rank_pattern={f".*layer{number}.*": 8 for number in range(100_000)}),
    "many-alternatives": _config(rank_pattern={"|".join(f"x{number}.*y" for number in range(50_000)): 8}),
    "empty-lists": _with_text("more", "[" + ",".join(["[]"] * (4 * MIB)) + "]"),
    "deep-lists": _with_text("more", "[" * 100_000 + "]" * 100_000),
    "deep-objects": _with_text("more", '{"a":' * 50_000 + "1" + "}" * 50_000),
    "long-number": _with_text("more", "9" * MIB),
    "long-rank": _with_text("r", "9" * 5000),
    "many-targets": _config(target_modules=[f"m{number}" for number in range(500_000)]),
    "largest-rank": _config(r=1 << 16),
    "huge-alpha": _config(lora_alpha=1e30),
    "endless-alpha": _with_text("lora_alpha", "1e999"),
    "huge-alpha-pattern": _config(alpha_pattern={"q_proj": 1e25}),
    "huge-a": _scaled("lora_A", 1e25),
    "huge-b": _scaled("lora_B", 1e25),
    "long-metadata": _header(lambda header: header.update(__metadata__={"text": "x" * (40 * MIB)})),
    "many-metadata": _header(lambda header: header.update(__metadata__={f"{n}": "" for n in range(1_000_000)})),
    "long-description": _described({"dtype": "F32", "shape": [1] * 10_000_000, "data_offsets": [0, 4]}),
    "deep-description": _bytes(
        WEIGHTS, lambda: (10_000_008).to_bytes(8, "little") + b'{"a":' + b"[" * 10_000_003 + b"\0" * 64
    ),
    "long-name": _header(lambda header: header.update({"x" * (10 * MIB): {}})),
    "longest-header": _bytes(WEIGHTS, (1 << 63).to_bytes(8, "little") + b"{}"),
    "spaces": _bytes(WEIGHTS, lambda: (20 * MIB).to_bytes(8, "little") + b" " * (20 * MIB)),
    "sparse": _sparse(1 << 40),
    "many-shards": _shards(3000),
    "long-index": _shards(2, 64 * MIB),
    "pipe": _pipe(WEIGHTS),
    "device": _link(WEIGHTS, "/dev/zero"),
    "folder": _directory(CONFIG),
}


def make_all(good: Path, root: Path) -> Iterator[str]:
    """Make every broken and every hostile adapter below `root` from the good one; their names."""
    for name, make in (*((case.name, case.make) for case in BROKEN), *HOSTILE.items()):
        make(shutil.copytree(good, root / name))
        yield name


def change(directory: Path, number: int) -> None:
    """Other bytes, where a configuration can be written: what is known of the last ones does not help."""
    file = directory / CONFIG
    if file.is_file():
        with file.open("a") as config:
            config.write(" " * (number + 1))
