"""Compare the ledger of vLLM symbols (`lora_plugins.vllm_patches.ledger`) with vLLM's sources, without importing vLLM.

    python tools/check_seams.py [SOURCES_DIR ...]

A SOURCES_DIR holds a `vllm/` package, such as an unpacked wheel; without one, the installed vLLM is read. Prints one
line per seam and version; the exit code is 1 where any of them differs from the ledger.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lora_plugins.vllm_patches.ledger import SEAMS, Seam
from lora_plugins.vllm_patches.ledger_check import check, version
from lora_plugins.vllm_patches.ledger_check import installed as installed_sources


def installed() -> Path:
    """Where the installed vLLM's sources are; it is not imported."""
    found = installed_sources()
    if found is None:
        raise SystemExit("no vLLM is installed; name a directory with its sources")
    return found


def main(arguments: Sequence[str], seams: Sequence[Seam] = SEAMS) -> int:
    wrong = 0
    for sources in [Path(argument) for argument in arguments] or [installed()]:
        if not (sources / "vllm").is_dir():
            raise SystemExit(f"no directory vllm in {sources}")
        name = version(sources)
        for seam in seams:
            difference = check(seam, sources)
            wrong += bool(difference)
            print(
                f"{name}  {'differs' if difference else 'as noted'}  {seam.symbol}"
                + f": {difference}" * bool(difference)
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
