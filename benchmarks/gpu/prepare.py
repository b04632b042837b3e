"""Fill the folder that travels to a machine with a GPU, `.cache/gpu`: `python -m benchmarks.gpu prepare SOURCES`.

SOURCES is an unpacked wheel of vLLM 0.33 for CUDA. Its Python files are taken, an empty module for the compiled one
that they import, pyzmq, which they import too and that machine lacks, and the commit of this checkout, for a machine
without git. Run it again after every commit: results say which sources they are of.
docs/explanation/kernels-gpu.md has the rest.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.vllm import CARRIED, EMPTY_MODULE
from benchmarks.record import carry_commit

MOST_BYTES = 56 << 20  # of the 64 MiB that travel; the rest of the tree is 5 MiB
PYZMQ = "pyzmq==27.3.0"


def prepare(sources: Path, into: Path = CARRIED) -> None:
    """Fill the folder.

    Raises:
        SystemExit: `sources` is no wheel of vLLM, or too much is to travel.
    """
    copy_vllm(sources, into)
    add_packages(into)
    carry_commit(into / "commit.json")
    size = sum(path.stat().st_size for path in into.rglob("*") if path.is_file())
    print(f"{into}: {size / 2**20:.0f} MiB")
    if size > MOST_BYTES:
        raise SystemExit(f"more than {MOST_BYTES >> 20} MiB do not travel")


def copy_vllm(sources: Path, into: Path) -> None:
    """vLLM's Python files, less what its LoRA operators do not need; a table in there for this GPU is kept."""
    if not (sources / "vllm" / "lora").is_dir():
        raise SystemExit(f"{sources} holds no vllm/lora; it should be an unpacked wheel of vLLM")
    for old in ("vllm", *(path.name for path in into.glob("vllm-*.dist-info"))):
        shutil.rmtree(into / old, ignore_errors=True)
    for path in sorted(sources.rglob("*")):
        relative = path.relative_to(sources)
        if not relative.parts[0].startswith("vllm") or not path.is_file():
            continue
        if path.suffix == ".py" or ".dist-info" in relative.parts[0]:
            target = into / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for folder in sorted((into / "vllm").rglob("models")):  # a third of it, and never imported
        if folder.is_dir() and folder.parent.name != "lora":
            shutil.rmtree(folder)
    (into / "vllm" / f"{EMPTY_MODULE}.py").write_text('"""Empty: in place of a compiled module of vLLM."""\n')


def add_packages(into: Path) -> None:
    """What vLLM imports, and a machine with PyTorch and transformers lacks."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 26, 17)]
    target = ["--target", str(into), "--python-version", "3.12", "--only-binary=:all:", "--no-deps", "--upgrade"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *target, *platforms, PYZMQ], check=True)
