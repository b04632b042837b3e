"""Compare the ledger of vLLM symbols (`tools/ledger/`) with vLLM's sources, without importing vLLM.

    python tools/check_ledger.py [DIRECTORY ...]

A DIRECTORY holds a `vllm/` package, such as an unpacked wheel; without one, the installed vLLM is read. Prints every
entry with its reason, the end of it, and its symbols; the exit code is 1 where one of them differs from the ledger.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # called as a program, this folder alone is on the path

from lora_plugins.vllm_patches import vllm_sources
from tools.ledger import Patch, entries
from tools.ledger.check import check


def installed() -> Path:
    """Where the installed vLLM's sources are; it is not imported."""
    found = vllm_sources.installed()
    if found is None:
        raise SystemExit("no vLLM is installed; name a directory with its sources")
    return found


def version(sources: Path) -> str:
    """The release of the sources."""
    release = vllm_sources.release_of(sources)
    return f"vllm {release}" if release else f"vllm in {sources}"


def main(arguments: Sequence[str], ledger: Mapping[str, Sequence[Patch]] | None = None) -> int:
    ledger = entries() if ledger is None else ledger
    wrong = 0
    for sources in [Path(argument) for argument in arguments] or [installed()]:
        if not (sources / "vllm").is_dir():
            raise SystemExit(f"no directory vllm in {sources}")
        name = version(sources)
        for file, of_file in ledger.items():
            for entry in of_file:
                print(f"{file}: {entry.what}\n    why    {entry.why}\n    until  {entry.remove}")
                for symbol in entry.parsed():
                    difference = check(symbol, sources)
                    wrong += bool(difference)
                    said = f"differs   {symbol.name}: {difference}" if difference else f"as noted  {symbol.name}"
                    print(f"    {name}  {said}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
