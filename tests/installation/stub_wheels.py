"""Wheels and environments made of metadata only, so that pip and uv resolve what users have without an index."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pip


def stub_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel of this name and version that holds its metadata and nothing else."""
    stem = f"{re.sub(r'[-.]+', '_', name)}-{version}"
    file = folder / f"{stem}-py3-none-any.whl"
    extras = {extra for text in requires for extra in re.findall(r"extra == \"(\w+)\"", text)}
    needs = "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    needs += "".join(f"Requires-Dist: {text}\n" for text in requires)
    contents = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{stem}.dist-info/{member},,\n" for member in (*contents, "RECORD"))
    with zipfile.ZipFile(file, "w") as wheel:
        for member, text in {**contents, "RECORD": record}.items():
            wheel.writestr(f"{stem}.dist-info/{member}", text)
    return file


@dataclass
class Environment:
    """A virtual environment, and an index of wheels that pip and uv may install into it."""

    folder: Path
    index: Path
    python: Path = field(init=False)

    def __post_init__(self) -> None:
        venv.create(self.folder, with_pip=False)
        self.python = self.folder / "bin" / "python"
        self.index.mkdir(exist_ok=True)

    def have_pip(self) -> None:
        """Copy the pip that runs here, compiled; `ensurepip` installs one in some seconds."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        shutil.copytree(Path(pip.__file__).parent, site / "pip")
        command = self.folder / "bin" / "pip"
        command.write_text(f'#!/bin/sh\nexec "{self.python}" -m pip "$@"\n')
        command.chmod(0o755)

    def have(self, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
        """Install a stub, as unzipping its wheel does."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        with zipfile.ZipFile(stub_wheel(self.index, name, version, requires)) as wheel:
            wheel.extractall(site)

    def offer(self, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
        """Put a stub into the index."""
        stub_wheel(self.index, name, version, requires)

    def install(self, tool: str, *what: str) -> subprocess.CompletedProcess[str]:
        """Run `pip install` or `uv pip install` from the index alone."""
        command = {
            "pip": [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-cache-dir"],
            "uv": [sys.executable, "-m", "uv", "pip", "install", "--python", str(self.python), "--no-cache"],
        }[tool]
        sources = ["--no-index", "--find-links", str(self.index)]
        return subprocess.run([*command, *sources, *what], capture_output=True, text=True, check=False, timeout=300)

    def installed(self) -> dict[str, str]:
        """The version of each distribution that is there."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        found = importlib.metadata.distributions(path=[str(site)])
        return {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in found}
