"""The fixtures are what PEFT writes and what engines say, and real servers judge as the table does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_plugins.adapter.model_modules import ModelModules
from testbed.architectures import BY_NAME
from testbed.forked_engines import ForkedEngines
from testbed.models import build_base
from testbed.trainers import shapes
from testbed.trainers.adapters import HIDDEN, LAYERS, RANK, Base
from testbed.trainers.forms import CONFIG, WEIGHTS, peft
from testbed.trainers.shapes import Shape
from testbed.trainers.table import write
from tests.trainers.bases import BASES

pytestmark = pytest.mark.nightly

OF_PEFT = {
    shapes.IN_ATTENTION: {},
    shapes.ALL_LINEAR: {},
    shapes.RSLORA: {"use_rslora": True},
    shapes.PATTERNS: {"rank_pattern": {"q_proj": 2 * RANK}, "alpha_pattern": {r"1\.self_attn\.o_proj": 4}},
    shapes.HEAD: {},
    shapes.WORDS: {},
    shapes.LAST_LAYER: {"layers_to_transform": [1]},
    shapes.DORA: {"use_dora": True},
    shapes.B_BIAS: {"lora_bias": True},
    shapes.TOKENS: {"trainable_token_indices": [3, 17]},
    shapes.PISSA: {"init_lora_weights": "pissa"},
    shapes.IA3: {"feedforward_modules": ["down_proj"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("llama") / "base", hidden=HIDDEN, layers=LAYERS)


@pytest.mark.parametrize("shape", OF_PEFT, ids=lambda one: one.what)
def test_fixtures_in_pefts_form_are_what_peft_saves(base: Path, tmp_path: Path, shape: Shape) -> None:
    from peft import IA3Config, LoraConfig, get_peft_model
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    fixture = shape.make()
    targets = fixture.config["target_modules"]
    given = {"target_modules": targets, "task_type": "CAUSAL_LM", **OF_PEFT[shape]}
    config = IA3Config(**given) if shape is shapes.IA3 else LoraConfig(r=RANK, lora_alpha=2 * RANK, **given)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "peft")
    written = write(peft(fixture), tmp_path / "fixture")
    made, expected = ({n: a.shape for n, a in load_file(one / WEIGHTS).items()} for one in (written, tmp_path / "peft"))
    assert made == expected
    made, expected = (json.loads((one / CONFIG).read_text()) for one in (written, tmp_path / "peft"))
    same = ("base_model_name_or_path", "target_modules")  # a path; a set, in any order
    assert {key: value for key, value in made.items() if key not in same} == {
        key: value for key, value in expected.items() if key not in same
    }


def test_description_of_experts_is_the_engines(tmp_path: Path) -> None:
    architecture = BY_NAME["Qwen3MoeForCausalLM"]
    with ForkedEngines(tmp_path / "engines.log") as engines, engines.engine(architecture, tmp_path) as engine:
        engine.call("build")
        modules = ModelModules.of_plain(engine.call("make"))
    model = BASES[Base.EXPERTS].model
    assert model is not None
    assert {name: modules.places.get(name) for name in model.modules.places} == model.modules.places
    assert modules.experts == model.modules.experts


def test_real_servers_judge_as_the_table_says() -> None:
    from benchmarks.models.trainers import measure

    found = measure("")
    assert {one.name: (one.stock, one.ours) for one in found if not one.is_right} == {}
