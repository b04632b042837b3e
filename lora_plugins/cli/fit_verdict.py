"""Sentences of `why` and `inspect` on whether an adapter fits the base model of `--base-model`.

Pure functions, called in the command's process after the adapter has been read. In: the base model, or None without the
option, and the adapter's rank and files. Out: text for people.
"""

from __future__ import annotations

from collections.abc import Collection

from lora_plugins.adapter.fit import BaseModel, slot_rank
from lora_plugins.adapter.weight_files import PICKLE_FILES


def compared_with(base: BaseModel) -> str:
    """Return the facts of the base model for a comparison."""
    limit = "any rank (--max-lora-rank)" if base.max_rank is None else f"ranks up to {base.max_rank}"
    if base.model is None:
        return f"its name, {limit}; no engine has listed its modules in this store yet"
    modules = base.model.modules
    return f"{len(modules.places)} modules of vLLM {modules.vllm_version}'s {modules.architecture}, {limit}"


def why_not_compared(base: BaseModel | None, files: Collection[str]) -> str:
    """Return why an adapter of `files` was not compared with a base model's modules, or nothing."""
    if base is None:
        return "no base model was given (--base-model)"
    if base.model is None:
        return f"no engine has listed the modules of {base.path} in this store; serve an adapter with it once"
    return "its weights are a pickle, which is not read" if any(name in PICKLE_FILES for name in files) else ""


def would_be_served(base: BaseModel | None, rank: int) -> str:
    """Return the verdict on a compared adapter, with the server's option that was not compared."""
    size = slot_rank(rank) if base is None or base.max_rank is None else None
    return "would be served" if size is None else f"would be served, with --max-lora-rank {size} or more"
