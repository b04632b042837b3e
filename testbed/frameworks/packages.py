"""RL frameworks as the package index has them, in a folder of their own beside the project's packages; made once.

A program of theirs runs with this folder before `.venv`, which has torch, Transformers, PEFT and vLLM: so only what
`.venv` lacks is fetched, 130 MB, and `.venv` stays as it is. Versions are pinned; another pin is another folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "frameworks"
FRAMEWORKS = {"trl": "1.16.0", "verl": "0.9.1", "openpipe-art": "0.5.18", "skyrl": "0.3.0"}
# What their modules import and `.venv` lacks.
_IMPORTED = (
    "datasets==5.2.0", "pandas==3.1.1", "pyarrow==26.0.1", "multiprocess==0.70.19", "xxhash==4.1.0", "pytz==2026.6",
    "tzdata==2026.6", "tensordict==0.10.0", "pyvers==0.2.3", "orjson==3.13.0", "codetiming==1.4.0",
    "hydra-core==1.3.8", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3", "torchdata==0.11.0", "polars==2.1.0",
    "litellm==1.82.0", "fastuuid==0.14.0", "tblib==3.2.2", "setproctitle==1.3.8", "nest-asyncio==1.6.0",
)  # fmt: skip
_PACKAGES = (*(f"{name}=={version}" for name, version in FRAMEWORKS.items()), *_IMPORTED)
FOLDER = CACHE / f"packages-{hashlib.sha256(' '.join(_PACKAGES).encode()).hexdigest()[:12]}"
_LONGEST_S = 600.0


class NoFrameworks(Exception):
    """The packages cannot be had here: the index cannot be reached, or lacks one."""


def frameworks() -> Path:
    """Return the folder with the packages, filled on the first call of a checkout.

    Raises:
        NoFrameworks: the packages cannot be had.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):
        if not FOLDER.exists():
            unfinished = CACHE / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            done = subprocess.run(
                [*install, "--target", str(unfinished), *_PACKAGES],
                capture_output=True, text=True, check=False, timeout=_LONGEST_S,
            )  # fmt: skip
            if done.returncode:
                raise NoFrameworks("\n".join((done.stdout + done.stderr).splitlines()[-8:]))
            os.replace(unfinished, FOLDER)
    return FOLDER
