"""The base model of `--base-model`, described as a server of the model would describe it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Collection, Sequence
from typing import Annotated

import typer

from lora_plugins.adapter.fit import BaseModel, original_name_of, slot_rank
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.weight_files import PICKLE_FILES
from lora_plugins.cli import UsageProblem
from lora_plugins.settings import Settings
from lora_plugins.store.model_file import ModelFile
from lora_plugins.vllm_patches.model_modules import model_of

BasePath = Annotated[str | None, typer.Option("--base-model", help="Path or Hub id of the server's base model.")]
ServedNames = Annotated[
    list[str] | None, typer.Option("--served-model-name", help="The served names of the base model; may be repeated.")
]
MaxRank = Annotated[int | None, typer.Option("--max-lora-rank", min=1, help="The server's largest rank.")]


def read_base(
    settings: Settings, path: str | None, served_names: Sequence[str] | None, max_rank: int | None
) -> BaseModel | None:
    """Describe the base model at a path or Hub id; an engine with this store has listed the modules.

    Raises:
        UsageProblem: the engine's list cannot be read; there is no path, or nothing at the path.
    """
    if path is None:
        if served_names or max_rank is not None:
            raise UsageProblem(
                "--served-model-name and --max-lora-rank say something of a base model: give --base-model"
            )
        return None
    # A relative path that does not exist may be a Hub id.
    if os.path.isabs(path) and not os.path.exists(path):
        raise UsageProblem(f"--base-model {path}: no such directory")
    if os.path.exists(path):
        path = os.path.abspath(path)
    return BaseModel(
        path=path,
        served_names=tuple(served_names or ()),
        aliases=settings.base_aliases,
        max_rank=max_rank,
        model=_read_model(settings, path),
        original_name=original_name_of(path),
    )


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


def _read_model(settings: Settings, path: str) -> Model | None:
    """Return the model as an engine with the store has listed it, or None."""
    file = ModelFile(settings.store_dir, path)
    try:
        modules = file.read()
    except (OSError, ValueError) as error:
        raise UsageProblem(f"--base-model {path}: {file.path} cannot be read ({error})") from None
    if modules is None:
        return None
    # Libraries write to stderr while they are imported.
    with contextlib.redirect_stderr(io.StringIO()):
        logging.disable(logging.WARNING)
        try:
            return model_of(modules)
        except ImportError as error:
            raise UsageProblem(f"--base-model {path}: names are read by vLLM, which is not here ({error})") from None
        finally:
            logging.disable(logging.NOTSET)
