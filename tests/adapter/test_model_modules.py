"""What the engine says of its model's modules, as text and as values."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lora_plugins.adapter.model_modules import FORMAT, ModelModules, Unadapted
from tests.make import MODULES


def test_a_description_survives_json():
    assert ModelModules.of_plain(json.loads(json.dumps(MODULES.plain()))) == MODULES


def test_stages_of_a_pipeline_say_together_what_takes_no_adapter():
    """A module that one of them computes is computed."""
    name = next(iter(MODULES.places))
    uncalled = dict.fromkeys(("layers.0.kv_b_proj", name), Unadapted.UNCALLED)
    first = dataclasses.replace(MODULES, places={}, unadapted=uncalled)
    whole = first.joined(dataclasses.replace(MODULES, unadapted={"layers.1.kv_b_proj": Unadapted.UNCALLED}))
    assert {whole.why_unadapted(f"layers.{layer}.kv_b_proj") for layer in (0, 1)} == {Unadapted.UNCALLED}
    assert whole.key(name) == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[]", "not the modules of a model"),
        ("{}", f"format None, not {FORMAT}"),
        ('{"format": 2}', f"format 2, not {FORMAT}"),
        (
            json.dumps({**MODULES.plain(), "places": {"a": 1}}),
            "not the modules of a model: Expected `array`, got `int`",
        ),
        (json.dumps({"format": FORMAT}), "not the modules of a model: Object missing required field `architecture`"),
    ],
)
def test_a_file_that_is_no_description_says_why(text, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        ModelModules.of_plain(json.loads(text))
