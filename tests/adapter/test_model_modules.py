"""What the engine says of its model's modules, as text and as values."""

from __future__ import annotations

import json

import pytest

from lora_plugins.adapter.model_modules import FORMAT, ModelModules
from tests.make import MODULES


def test_a_description_survives_json():
    assert ModelModules.of_json(json.dumps(MODULES.plain())) == MODULES


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[]", "not the modules of a model"),
        ("{}", "format None, not 4"),
        ('{"format": 2}', "format 2, not 4"),
        (json.dumps({**MODULES.plain(), "places": {"a": 1}}), "not the modules of a model: cannot unpack"),
        (json.dumps({"format": FORMAT}), "not the modules of a model: 'places'"),
    ],
)
def test_a_file_that_is_no_description_says_why(text, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        ModelModules.of_json(text)
