"""Compare the ledger of vLLM symbols (`lora_plugins.ledger`) with vLLM's sources, without importing vLLM.

    python tools/check_ledger.py [DIRECTORY ...]

A DIRECTORY holds a `vllm/` package, such as an unpacked wheel; without one, the installed vLLM is read. Prints every
entry with its reason, the end of it, and its symbols; the exit code is 1 where one of them differs from the ledger.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_plugins.ledger import Patch, entries
from lora_plugins.ledger.check import check, version
from lora_plugins.ledger.check import installed as installed_sources


def installed() -> Path:
    """Where the installed vLLM's sources are; it is not imported."""
    found = installed_sources()
    if found is None:
        raise SystemExit("no vLLM is installed; name a directory with its sources")
    return found


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
