"""Modules of engines' models, in the store, for commands that look at an adapter without an engine.

An API server writes the file once its engine has described the model; the command line reads it (`cli/base_model.py`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from lora_plugins.adapter.model_modules import ModelModules
from lora_plugins.store.layout import Layout, key_of, replace_small


class ModelFile:
    """The file of one base model, as some engine wrote the file last."""

    def __init__(self, root: Path, base_path: str) -> None:
        """Name the file of a served model, by the model's path or Hub id, in the store below `root`."""
        # One file for all spellings of a directory; a Hub id is no path.
        base_path = os.path.realpath(base_path) if os.path.isdir(base_path) else base_path
        self.path = Layout(root).folder("models") / f"{key_of(base_path)}.json"

    def read(self) -> ModelModules | None:
        """The modules that an engine wrote last; None where no engine has written any.

        Raises:
            OSError: the file cannot be read. ValueError: the file has another format.
        """
        try:
            return ModelModules.of_plain(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def write(self, modules: ModelModules) -> None:
        """Replace the modules written before.

        Raises:
            OSError: the file cannot be written.
        """
        replace_small(self.path, json.dumps(modules.plain()))
