"""`make mutants`: do the tests notice what a review would find? Each mutant runs in a copy of the tree.

Exit status 1 where one survives; 2 where its text is no longer there, or its tests fail without it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutants.mutants import MUTANTS, Mutant

_TREE = Path(__file__).parents[2]
_TIMEOUT_S = 300  # of one test: one that hangs has noticed something too
_ENDING_S = 60  # a test that is interrupted ends its server


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="of these mutants; may be repeated")
    only = parser.parse_args().only
    mutants = [mutant for mutant in MUTANTS if not only or mutant.name in only]
    if unknown := set(only or ()) - {mutant.name for mutant in mutants}:
        parser.error(f"no mutant named {', '.join(sorted(unknown))}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        try:
            return _run(mutants, Path(directory))
        except KeyboardInterrupt:
            return 130


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _run(mutants: list[Mutant], copy: Path) -> int:
    _copy_tree(copy)
    for mutant in mutants:
        mutated(mutant)  # before minutes are spent
    status, output, took_s = _pytest(copy, dict.fromkeys(target for mutant in mutants for target in mutant.targets))
    print(f"unchanged: {took_s:.0f} s", flush=True)
    if status != 0:
        print(output, "the tests fail without any mutant", sep="\n")
        return 2
    survivors = 0
    for number, mutant in enumerate(mutants):
        path = copy / mutant.file
        path.write_text(mutated(mutant))
        # Compiled modules are known by their source's size and second: a second that no other version has.
        os.utime(path, (number, number))
        status, output, took_s = _pytest(copy, mutant.targets)
        shutil.copy2(_TREE / mutant.file, path)
        failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
        is_caught = status == 1 and failed is not None
        print(f"{mutant.name:44} {failed[1] if is_caught and failed else 'SURVIVES':90} {took_s:3.0f} s", flush=True)
        if not is_caught:
            survivors += 1
            print(f"pytest's exit status: {status}", output[-2000:], sep="\n", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants are caught")
    return 1 if survivors else 0


def _copy_tree(copy: Path) -> None:
    copy.chmod(0o755)  # some tests run as other users
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=_TREE, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (_TREE / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_TREE / name, copy / name)


def mutated(mutant: Mutant) -> str:
    """The text of the file with the mistake."""
    text = (_TREE / mutant.file).read_text()
    if text.count(mutant.old) != 1 or mutant.old == mutant.new:
        print(f"{mutant.name}: {mutant.file} has its text {text.count(mutant.old)} times, not once")
        raise SystemExit(2)
    return text.replace(mutant.old, mutant.new)


def _pytest(copy: Path, targets: Iterable[str]) -> tuple[int, str, float]:
    began = time.monotonic()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", f"--timeout={_TIMEOUT_S}"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.mutants.imported", *targets),
        ],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C is for us, and passed on once
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
