"""The base model of `--base-model`, described as a server that serves it would."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from lora_plugins.adapter.fit import BaseModel, original_name_of
from lora_plugins.adapter.landing import Model
from lora_plugins.cli.exits import UsageProblem
from lora_plugins.settings import Settings
from lora_plugins.store.model_file import ModelFile
from lora_plugins.vllm_patches.model_modules import model_of

BasePath = Annotated[
    str | None, typer.Option("--base-model", help="Path or Hub id of the base model that the server serves.")
]
ServedNames = Annotated[
    list[str] | None, typer.Option("--served-model-name", help="The server's names for it; may be repeated.")
]
MaxRank = Annotated[int | None, typer.Option("--max-lora-rank", min=1, help="The server's largest rank.")]


def read_base(
    settings: Settings, path: str | None, served_names: Sequence[str] | None, max_rank: int | None
) -> BaseModel | None:
    """Describe the base model at a path or Hub id; its modules are what an engine with this store said of them.

    Raises:
        UsageProblem: what an engine said cannot be read; there is no path, or nothing at it.
    """
    if path is None:
        if served_names or max_rank is not None:
            raise UsageProblem(
                "--served-model-name and --max-lora-rank say something of a base model: give --base-model"
            )
        return None
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


def _read_model(settings: Settings, path: str) -> Model | None:
    """What an engine that used this store said of the model; None where none has."""
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
