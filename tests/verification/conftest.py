"""Processes that read adapters, and an adapter to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lora_plugins.settings import Settings
from lora_plugins.verification import process
from lora_plugins.verification.children import Children
from lora_plugins.verification.messages import ReadAdapter
from tests.make import adapter_files, put

HOLD = "import time; from lora_plugins.verification import child; child.verify_adapter = lambda *_: time.sleep(600)"
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
    monkeypatch.setattr(process, "_PROGRAM", process._PROGRAM.replace("main()", f"{first}\nmain()"))
