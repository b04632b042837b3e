"""A real engine in this process, for what is measured inside of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def engine(base: Path, **settings: Any) -> Iterator[Any]:
    """The worker's LoRA manager of an engine with this model; `VLLM_PLUGINS` says whose."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    )
    from vllm import LLM

    llm = LLM(
        model=str(base),
        dtype="float32",
        enforce_eager=True,
        enable_lora=True,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        **settings,
    )
    yield llm.collective_rpc(_manager)[0]
    llm.llm_engine.engine_core.shutdown()


def _manager(worker: Any) -> Any:
    return worker.model_runner.lora_manager
