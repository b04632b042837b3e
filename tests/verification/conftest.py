"""Processes that read adapters, and an adapter to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lora_plugins.adapter.layouts.writing import tensors_of, write_weights
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.settings import Settings
from lora_plugins.verification import reading_process
from lora_plugins.verification.children import Children
from lora_plugins.verification.protocol import ReadAdapter
from tests.make import BASE, adapter_files, put, weights

NAMED = adapter_files({name.replace(".weight", ".default.weight"): array for name, array in weights().items()})
HOLD = "time.sleep(600)"
HOLD_WHERE_ASKED = """
import os, time
from lora_plugins.verification import child
verify = child.verify_adapter
def held(directory, *more):
    while os.path.exists(os.path.join(directory, "hold")):
        time.sleep(0.01)
    return verify(directory, *more)
child.verify_adapter = held
"""


@pytest.fixture(scope="session")
def kept_children() -> Iterator[Children]:
    """For tests that leave the processes as they are: they start one together."""
    made = Children()
    yield made
    made.end()


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.end()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return put(tmp_path / "sql", adapter_files())


def read(children: Children, directory: Path, **changes: object) -> ReadAdapter:
    return children.read(directory, replace(Settings(), **changes)).result(120)


def program(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Have every process that is started now do this before it answers."""
    monkeypatch.setattr(reading_process, "_PROGRAM", reading_process._PROGRAM.replace("main()", f"{first}\nmain()"))


def reading_is(monkeypatch: pytest.MonkeyPatch, expression: str) -> None:
    """Have every process that is started now compute this instead of reading an adapter."""
    first = "import ctypes, itertools, os, signal, time; from lora_plugins.verification import child"
    program(monkeypatch, f"{first}\nchild.verify_adapter = lambda *_: {expression}")


def written(children: Children, directory: Path, target: Path) -> tuple[list[int], list[int]]:
    """What a process reports while it writes `target`, and this process while it writes `here`."""
    conversion = verify_adapter(directory, BASE, Settings()).conversion
    assert conversion is not None
    there, here = list[int](), list[int]()
    children.write(tensors_of(conversion), directory, target, there.append).result(120)
    write_weights(
        tensors_of(conversion), lambda file: directory / (file or WEIGHTS_FILE), target.with_name("here"), here.append
    )
    return there, here
