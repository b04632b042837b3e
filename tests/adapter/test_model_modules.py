"""What the engine says of its model's modules, as text and as values."""

from __future__ import annotations

import json

import pytest

from lora_plugins.adapter.model_modules import ModelModules
from tests.make import MODULES


def test_a_description_survives_json():
    assert ModelModules.of_json(json.dumps(MODULES.plain())) == MODULES


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', json.dumps({**MODULES.plain(), "places": {"a": 1}}), '{"format": 1}']
)
def test_a_file_that_is_no_description_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        ModelModules.of_json(text)
