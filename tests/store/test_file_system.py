"""A file system that cannot hold the store is found at start: in unit tests, and below real processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.settings import Settings
from lora_plugins.store.file_system import check_owners
from lora_plugins.store.store import open_store

# What libc answers in a process that has this loaded before it.
SHIM = """
#include <errno.h>
int answer(int number) { if (number) { errno = number; return -1; } return 0; }
int %s { return answer(%d); }
"""
LOCK = "flock(int descriptor, int operation)"


def refuse(number: int) -> Callable[..., None]:
    def answer(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return answer


CASES = {
    "no locks": (refuse(errno.ENOLCK), "without file locks (flock answers 'No locks available')"),
    "locks not supported": (refuse(errno.ENOTSUP), "without file locks"),
    "locks not built in": (refuse(errno.ENOSYS), "without file locks"),
    "locks that always succeed": (lambda *_: None, "file locks let two in at once"),
    "another failure": (refuse(errno.EIO), "Input/output error"),
}


@pytest.mark.parametrize("case", CASES)
def test_startup_fails_on_an_unfit_file_system(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, text = CASES[case]
    monkeypatch.setattr(fcntl, "flock", answer)
    with pytest.raises(InvalidSettings) as caught:
        open_store(Settings(store_dir=tmp_path / "store"))
    assert text in str(caught.value)
    assert "LORA_PLUGINS_STORE_DIR" in caught.value.remedy
    monkeypatch.undo()
    assert list((tmp_path / "store" / ".tmp").iterdir()) == []


@pytest.mark.parametrize("held", [errno.EAGAIN, errno.EACCES])
def test_every_word_for_a_held_lock_is_known(held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [lambda: None, refuse(held)]
    monkeypatch.setattr(fcntl, "flock", lambda *_: answers.pop(0)())
    assert open_store(Settings(store_dir=tmp_path / "store"))
    assert answers == []


@pytest.fixture
def shim(tmp_path: Path) -> Callable[[str, int], dict[str, str]]:
    """An environment in which a function of libc has one answer."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")

    def build(function: str, number: int) -> dict[str, str]:
        source, library = tmp_path / "shim.c", tmp_path / "shim.so"
        source.write_text(SHIM % (function, number))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        return {**os.environ, "LD_PRELOAD": str(library), "LORA_PLUGINS_STORE_DIR": str(tmp_path / "store")}

    return build


DOCTOR_AND_START = """
from lora_plugins.cli import main
try:
    main()
except SystemExit:
    from lora_plugins.process import this_process
    this_process().resolver
"""


@pytest.mark.parametrize(
    ("function", "number", "text"),
    [
        (LOCK, errno.ENOLCK, "without file locks"),
        (LOCK, 0, "file locks let two in at once"),
    ],
    ids=["no locks", "locks that always succeed"],
)
def test_the_doctor_and_the_start_say_the_same(shim, function: str, number: int, text: str) -> None:
    command = [sys.executable, "-c", DOCTOR_AND_START, "doctor", "--json"]
    done = subprocess.run(command, env=shim(function, number), capture_output=True, text=True, check=False)
    (found,) = [item for item in json.loads(done.stdout)["findings"] if item["check"] == "store"]
    assert found["state"] == "problem"
    assert text in found["found"]
    assert "[L007] found a store on a file system" in done.stderr
    assert text in done.stderr


def test_a_volume_that_everybody_may_write_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    with pytest.raises(InvalidSettings, match="every user may exchange it"):
        check_owners(volume / "store")
    is_mount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == volume or is_mount(path))
    check_owners(volume / "store")
    check_owners(volume)
