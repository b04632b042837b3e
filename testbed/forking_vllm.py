"""`vllm` with its engine and workers forked, so that they need not import vLLM again: a start takes half the time.

    python -P testbed/forking_vllm.py serve MODEL …

On CPUs vLLM always spawns them. Elsewhere it forks them by default, so plugins must live with both.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys


def main() -> None:
    fork = functools.partial(multiprocessing.get_context, "fork")
    multiprocessing.get_context = lambda method=None: fork()
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[0] = "vllm"
    vllm()


if __name__ == "__main__":
    main()
