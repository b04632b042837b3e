"""What kind of model a class of vLLM's registry is, asked in this process.

vLLM asks in a new process, so that CUDA stays untouched in its own, and keeps the answer on the disk. On a fresh
machine without a GPU each such process takes a test 15 s for nothing.
"""

from __future__ import annotations


def ask_in_this_process() -> None:
    """Have vLLM's registry import model classes here (vllm/model_executor/models/registry.py, 0.30 to 0.33)."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda ask: ask()
