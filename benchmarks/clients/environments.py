"""Clients as the package indexes have them, each in an environment of its own in `.cache/`; made once.

Versions of the programs are pinned; another pin is another environment. What a program depends on comes as the index
resolves it, and is kept in the result (`versions`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "clients"
LONGEST_S = 300.0


class NotInstalled(Exception):
    """An environment cannot be had here: an index lacks a package, cannot be reached, or takes too long."""


@dataclass(frozen=True)
class Packages:
    """What a program is installed from: `names` pinned, of Python's index, or of npm's."""

    names: tuple[str, ...]
    is_npm: bool = False

    @property
    def folder(self) -> Path:
        digest = hashlib.sha256(" ".join(self.names).encode()).hexdigest()[:12]
        return CACHE / f"{self.names[0].partition('==')[0].partition('[')[0].partition('@')[0]}-{digest}"

    @property
    def bin(self) -> Path:
        return self.folder / ("node_modules/.bin" if self.is_npm else "bin")

    def install(self) -> float:
        """Make the environment on the first call; return how many seconds that took.

        Raises:
            NotInstalled: it cannot be made, or not within `LONGEST_S`.
        """
        CACHE.mkdir(parents=True, exist_ok=True)
        with FileLock(CACHE / "lock"):
            # A virtual environment has its own path in its files: it is made where it stays, and marked once whole.
            mark = self.folder / "installed"
            if mark.exists():
                return float(mark.read_text())
            began = time.monotonic()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            try:
                for command in self._commands():
                    done = subprocess.run(
                        command, capture_output=True, text=True, check=False, timeout=LONGEST_S, cwd=self.folder
                    )
                    if done.returncode:
                        raise NotInstalled("\n".join((done.stdout + done.stderr).splitlines()[-4:]))
            except subprocess.TimeoutExpired:
                raise NotInstalled(f"not installed within {LONGEST_S:.0f} s") from None
            except FileNotFoundError as error:
                raise NotInstalled(str(error)) from None
            took_s = round(time.monotonic() - began, 1)
            mark.write_text(str(took_s))
        return took_s

    def _commands(self) -> list[list[str]]:
        if self.is_npm:
            return [["npm", "install", "--no-fund", "--no-audit", "--loglevel=error", *self.names]]
        pip = [str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        return [[sys.executable, "-m", "venv", str(self.folder)], [*pip, *self.names]]

    def versions(self) -> dict[str, str]:
        """The versions of all that is installed, by package."""
        if self.is_npm:
            folders = (self.folder / "node_modules" / name.rpartition("@")[0] for name in self.names)
            return {it.name: json.loads((it / "package.json").read_text())["version"] for it in folders}
        listed = [str(self.bin / "python"), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
        done = subprocess.run(listed, capture_output=True, text=True, check=True)
        return {row["name"]: row["version"] for row in json.loads(done.stdout)}
