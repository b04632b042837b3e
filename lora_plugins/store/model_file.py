"""What engines said of their models, in the store, for commands that look at an adapter without an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lora_plugins.adapter.model_modules import ModelModules
from lora_plugins.store.layout import Layout, key_of, replace_small


class ModelFile:
    """The file of one base model, the one that an engine wrote last."""

    def __init__(self, root: Path, base_path: str) -> None:
        """Of the store below `root`, for the served model's path or Hub id."""
        base_path = os.path.realpath(base_path) if os.path.isdir(base_path) else base_path
        self.path = Layout(root).folder("models") / f"{key_of(base_path)}.json"

    def read(self) -> ModelModules | None:
        """What an engine said last; None where none has.

        Raises:
            OSError: the file cannot be read. ValueError: it is none of ours.
        """
        try:
            return ModelModules.of_json(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def write(self, modules: ModelModules) -> None:
        """Put this in the place of what was written before.

        Raises:
            OSError: it cannot be written.
        """
        replace_small(self.path, json.dumps(modules.plain()))
