"""The base model of `why --base-model` and `inspect --base-model`, as a server of the model would describe it.

Runs in the process of the command, without an engine: an engine that once served the model has listed its modules in
the store. In: the command's options and the settings. Out: a `BaseModel` to compare adapters with.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from typing import Annotated

import typer

from lora_plugins.adapter.fit import BaseModel, original_name_of
from lora_plugins.adapter.landing import Model
from lora_plugins.cli import UsageProblem
from lora_plugins.settings import Settings
from lora_plugins.store.model_file import ModelFile
from lora_plugins.vllm_patches.engine_modules import model_of

BaseModelPath = Annotated[str | None, typer.Option("--base-model", help="Path or Hub id of the server's base model.")]
ServedNames = Annotated[
    list[str] | None, typer.Option("--served-model-name", help="The served names of the base model; may be repeated.")
]
MaxRank = Annotated[int | None, typer.Option("--max-lora-rank", min=1, help="The server's largest rank.")]


def base_of_options(
    settings: Settings, path: str | None, served_names: list[str] | None, max_rank: int | None
) -> BaseModel | None:
    """Return the base model that the three options describe, with the modules that an engine has listed in the store.

    Returns:
        None without `--base-model`; a base model without `model` where no engine has listed its modules yet.

    Raises:
        UsageProblem: there is nothing at an absolute path; the engine's list cannot be read; an option without a path.
    """
    if path is None:
        if served_names or max_rank is not None:
            raise UsageProblem("--served-model-name and --max-lora-rank belong to a base model: give --base-model")
        return None
    # A relative path that does not exist may be a Hub id.
    if os.path.isabs(path) and not os.path.exists(path):
        raise UsageProblem(f"--base-model {path}: no such directory")
    path = os.path.abspath(path) if os.path.exists(path) else path
    return BaseModel(
        path=path,
        served_names=tuple(served_names or ()),
        aliases=settings.base_aliases,
        max_rank=max_rank,
        model=_read_model(settings, path),
        original_name=original_name_of(path),
    )


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
