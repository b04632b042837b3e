"""The base model of `--base-model`, described as a server of the model would describe it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from lora_plugins.adapter.fit import BaseModel, original_name_of, slot_rank
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.weight_files import PICKLE_FILES
from lora_plugins.cli import UsageProblem
from lora_plugins.cli.output import Output, Result, with_parameters
from lora_plugins.settings import Settings
from lora_plugins.store.model_file import ModelFile
from lora_plugins.vllm_patches.engine_modules import model_of


def _options(
    *,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="Path or Hub id of the server's base model.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="The served names of the base model; may be repeated.")
    ] = None,
    max_lora_rank: Annotated[int | None, typer.Option(min=1, help="The server's largest rank.")] = None,
) -> None:
    """The options of `on_base`."""


def on_base(function: Callable[..., Result]) -> Callable[..., Result]:
    """Have a command take a base model by options; an engine with the settings' store has listed its modules.

    Raises:
        UsageProblem: the engine's list cannot be read; there is no path, or nothing at the path.
    """

    def command(
        output: Output,
        *,
        base_model: str | None,
        served_model_name: list[str] | None,
        max_lora_rank: int | None,
        **more: Any,
    ) -> Result:
        base, path, settings = None, base_model, Settings.from_env()
        if path is None and (served_model_name or max_lora_rank is not None):
            raise UsageProblem("--served-model-name and --max-lora-rank belong to a base model: give --base-model")
        if path is not None:
            # A relative path that does not exist may be a Hub id.
            if os.path.isabs(path) and not os.path.exists(path):
                raise UsageProblem(f"--base-model {path}: no such directory")
            path = os.path.abspath(path) if os.path.exists(path) else path
            base = BaseModel(
                path=path,
                served_names=tuple(served_model_name or ()),
                aliases=settings.base_aliases,
                max_rank=max_lora_rank,
                model=_read_model(settings, path),
                original_name=original_name_of(path),
            )
        return function(output, settings=settings, base=base, **more)

    return with_parameters(command, function, _options, leaves_out=("settings", "base"))


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
