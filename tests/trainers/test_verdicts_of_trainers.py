"""What each trainer writes is served as trained, or refused by its cause and remedy; without an engine."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.config import AdapterConfig, parse_config
from lora_plugins.adapter.layouts.conversion_plan import Conversion
from lora_plugins.adapter.layouts.writing import tensors_of, write_weights
from lora_plugins.adapter.patterns import PatternBudget
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import Settings
from testbed.trainers.adapters import PEFT, Adapter, json_bytes, unstacked
from testbed.trainers.table import TRAINERS, Row, Trainer, rows
from tests.trainers.bases import BASES

ROWS = list(rows())
OF_WORKERS = {"biases"}  # of modules without a bias in the base model, which only workers know


def test_table_has_what_the_documentation_says() -> None:
    assert len(ROWS) >= 120
    assert len({one.name for one in TRAINERS}) >= 10
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda one: f"{one.name} {one.version}")
def test_each_is_served_as_trained_or_refused_by_cause(trainer: Trainer, tmp_path: Path) -> None:
    for row in (row for row in ROWS if row.trainer is trainer):
        directory = row.write(tmp_path)
        if row.refused and row.what not in OF_WORKERS:
            with pytest.raises(LoRAPluginsError) as caught:
                verify_adapter(directory, BASES[row.shape.base], Settings())
            assert re.search(row.refused, str(caught.value), re.DOTALL), (row.what, str(caught.value))
            continue
        verified = verify_adapter(directory, BASES[row.shape.base], Settings())
        if verified.conversion is not None:
            assert_computes_the_same(row, directory, verified.conversion, tmp_path / "converted")


def assert_computes_the_same(row: Row, directory: Path, conversion: Conversion, target: Path) -> None:
    from safetensors.numpy import load_file

    write_weights(tensors_of(conversion), lambda name: directory / (name or WEIGHTS_FILE), target, lambda _: None)
    made = products(Adapter(load_file(target)), parse_config(canonical_bytes(conversion.config)))
    right = row.right()
    expected = products(Adapter(unstacked(right.tensors)), parse_config(json_bytes(right.config)))
    if "text model" in row.what:
        made = {name.replace("model.text_model.", "model."): one for name, one in made.items()}
    for name in made.keys() | expected.keys():  # what one parameter alone leaves out is zeros
        assert np.allclose(made.get(name, 0), expected.get(name, 0), rtol=1e-3, atol=1e-6), (row.what, name)


def products(adapter: Adapter, config: AdapterConfig) -> dict[str, np.ndarray]:
    """What the adapter adds to the weight of each module."""
    found = {}
    for name, a in adapter.tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(PEFT).removesuffix(".lora_A.weight")
        b = adapter.tensors[name.replace(".lora_A.", ".lora_B.")]
        rank, alpha = config.ranks()(module, PatternBudget()), config.alphas()(module, PatternBudget())
        found[module] = b.astype(np.float64) @ a * config.scaling(rank, alpha)
    return found
