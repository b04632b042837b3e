"""The base model of `--base-model`, described as a server that serves it would."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.cli.exits import UsageProblem
from lora_plugins.settings import Settings

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
    """Describe the base model at a path or Hub id; its shapes come from its configuration, no weights are read.

    Raises:
        UsageProblem: it has no configuration that can be read, or there is no path.
    """
    if path is None:
        if served_names or max_rank is not None:
            raise UsageProblem(
                "--served-model-name and --max-lora-rank say something of a base model: give --base-model"
            )
        return None
    if os.path.exists(path):
        path = os.path.abspath(path)
    # Libraries write to stderr while they are imported; what is wrong with the model is raised below.
    with contextlib.redirect_stderr(io.StringIO()):
        logging.disable(logging.WARNING)
        try:
            from transformers import AutoConfig

            from lora_plugins.server.base_model import module_shapes

            shapes = module_shapes(AutoConfig.from_pretrained(path))
        except Exception as error:  # noqa: BLE001 - Transformers raises whatever its configuration classes raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageProblem(f"--base-model {path}: no configuration that can be read ({reason})") from None
        finally:
            logging.disable(logging.NOTSET)
    return BaseModel(
        path=path,
        served_names=tuple(served_names or ()),
        aliases=settings.base_aliases,
        max_rank=max_rank,
        module_shapes=shapes,
    )
