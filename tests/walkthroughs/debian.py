"""Programs of Debian that pages name: the machine's own, or a package's, unpacked into `.cache/` and not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.walkthroughs.reader import ROOT

CACHE = ROOT / ".cache" / "debian"
NGINX = ("nginx", "nginx")
PROMTOOL = ("promtool", "prometheus")
FOLDERS = ("usr/bin", "usr/sbin")


def folder_of(program: str, package: str) -> Path:
    """The folder of the program, for a PATH; skips the test where neither the machine nor Debian has the program."""
    places = [*os.environ["PATH"].split(os.pathsep), "/usr/sbin", *(str(CACHE / package / name) for name in FOLDERS)]
    found = shutil.which(program, path=os.pathsep.join(places)) or _unpacked(program, package)
    return Path(found).parent


def _unpacked(program: str, package: str) -> str:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        made = Path(name)
        try:
            subprocess.run(
                ["apt-get", "download", "-q", package], cwd=made, check=True, capture_output=True, timeout=300
            )
        except (OSError, subprocess.SubprocessError):
            pytest.skip(f"neither {program} nor Debian's package {package} can be had here")
        for file in list(made.glob("*.deb")):
            subprocess.run(["dpkg", "-x", file, made / package], check=True, timeout=300)
        if not (CACHE / package).exists():  # nor has another process been quicker
            (made / package).rename(CACHE / package)
    found = shutil.which(program, path=os.pathsep.join(str(CACHE / package / name) for name in FOLDERS))
    assert found, f"{package} has no {program}"
    return found
