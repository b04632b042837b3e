"""What an engine said of its model is found again by the model's path, whole or not at all."""

from __future__ import annotations

import pytest

from lora_plugins.store.model_file import ModelFile
from tests.make import MODULES


def test_what_was_written_is_read_for_its_model_only(tmp_path):
    assert ModelFile(tmp_path, "org/tiny").read() is None
    ModelFile(tmp_path, "org/tiny").write(MODULES)
    assert ModelFile(tmp_path, "org/tiny").read() == MODULES
    assert ModelFile(tmp_path, "org/other").read() is None
    assert [path.name for path in (tmp_path / ".models").iterdir()] == [ModelFile(tmp_path, "org/tiny").path.name]


def test_a_damaged_file_is_a_value_error(tmp_path):
    file = ModelFile(tmp_path, "org/tiny")
    file.write(MODULES)
    file.path.write_text(file.path.read_text()[:-5])
    with pytest.raises(ValueError, match=r"."):
        file.read()
