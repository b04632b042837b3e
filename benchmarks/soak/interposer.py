"""A disk that fails below a running server: a library that is preloaded, and a file that says what fails."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOURCE = Path(__file__).with_name("interposer.c")
_OPEN, _WRITE, _SYNC = 1, 4, 8
ENOSPC_CALLS = _OPEN | _WRITE | _SYNC


class Interposer:
    """A library of `interposer.c`, compiled into `home`, whose faults all processes have that are started with `env`.

    The processes that read adapters get none of the server's variables, and so none of these faults.
    """

    def __init__(self, home: Path, under: list[Path]) -> None:
        self._library, self._control = home / "interposer.so", home / "interposer.control"
        self._under = under
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-o", str(self._library), str(_SOURCE), "-ldl"],
            check=True,
        )
        self._control.write_bytes(struct.pack("3i", 0, 0, 0))

    @property
    def env(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "INTERPOSER_CONTROL": str(self._control),
            "INTERPOSER_UNDER": ":".join(map(str, self._under)),
        }

    @contextmanager
    def failing(self, number: int, per_1000: int, calls: int) -> Iterator[None]:
        """Inside, so many of these calls fail with this errno."""
        self._write(number, per_1000, calls)
        try:
            yield
        finally:
            self._write(0, 0, 0)

    def _write(self, *values: int) -> None:
        with self._control.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("3i", *values))
