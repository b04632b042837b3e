"""What a server needs to run vLLM's Model Runner V2 on a machine without a GPU, as CUDA users run it.

vLLM's CPU worker runs V2 where Triton has a backend for CPUs. The folder's `sitecustomize.py` puts a stand-in there, in
every process of the server; Triton's interpreter runs the kernels. Slow, and right: batches and answers stay small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from testbed.server import Server

FOLDER = Path(__file__).parent
# Whatever runs with it is forked from one process.
INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join(part for part in (str(FOLDER), os.environ.get("PYTHONPATH", "")) if part),
}
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", **INTERPRETED}
ARGUMENTS = ("--async-scheduling",)
LOGGED = ("Using V2 Model Runner", "v2_runner: asynchronous scheduling is True")


@contextmanager
def checked(starting: AbstractContextManager[Server]) -> Iterator[Server]:
    """Start a server; raises AssertionError where its log names another model runner."""
    with starting as server:
        log = server.log()
        assert all(line in log for line in LOGGED), "the server runs another model runner"
        yield server
