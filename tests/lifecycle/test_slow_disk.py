"""A store that takes long to change or list files, such as an `fsync` behind others' writes: answers go on."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lora_plugins
from tests.lifecycle.test_faults import OLD, OPERATIONS, Operation, Server

SLOW_S = 0.005
CALLS = ("mkdir", "link", "rename", "replace", "unlink", "rmdir", "utime", "chmod", "fsync", "scandir", "listdir")
PACKAGE, TESTS = os.path.dirname(lora_plugins.__file__), os.path.dirname(os.path.dirname(__file__))
# These sleep as long as a server waits before it tries again.
PATIENT = {"find damage", "serve a version by its digest"}


class SlowDisk:
    """Changes and listings take `SLOW_S` each; `of_loop` are those in the loop of the API server and the engine."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self._root, self.of_loop, self.count = str(root), list[str](), 0
        for name in CALLS:
            self._slow(patch, os, name, lambda _: True)
        self._slow(patch, io, "open", lambda mode="r", *_: bool(set(mode) & set("wax+")))

    def _slow(self, patch: pytest.MonkeyPatch, module: Any, name: str, is_change: Callable[..., bool]) -> None:
        original = getattr(module, name)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if (name == "fsync" or str(path).startswith(self._root)) and is_change(*(args or [None])):
                self.count += 1
                if threading.current_thread() is threading.main_thread() and _is_of_package():
                    self.of_loop.append(f"{name} {path}")
                time.sleep(SLOW_S)
            return original(path, *args, **kwargs)

        patch.setattr(module, name, call)


def _is_of_package() -> bool:
    """Whether the package makes a call, not a double of a source or of a body's receiver."""
    files = (frame.filename for frame in reversed(traceback.extract_stack()[:-2]))
    return next(file.startswith(PACKAGE) for file in files if file.startswith((PACKAGE, TESTS)))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in PATIENT])
def test_no_file_changes_or_listings_in_a_loop(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def trial(operation: Operation) -> SlowDisk:  # in real time, with real threads
        root = tmp_path / "store"
        server = Server(root, max_bytes=operation.max_bytes)
        server.source.answers["old"] = OLD
        await server.reconciler.start()
        await server.load("old")
        if operation.prepare is not None:
            await operation.prepare(server)
        with monkeypatch.context() as patch:
            disk = SlowDisk(patch, root)
            await operation.act(server)
        return disk

    disk = asyncio.run(trial(OPERATIONS[name]))
    assert disk.count > 0
    assert disk.of_loop == []
