"""Numbers so large that no served dtype holds what is computed with them."""

from __future__ import annotations

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import (
    InvalidAdapter,
)
from tests.adapter.verdicts import refused, verified
from tests.make import (
    config_bytes,
    safetensors,
    weights,
)


@pytest.mark.parametrize("alpha", [1e30, 1e300])
def test_an_alpha_that_no_dtype_can_hold_is_refused(adapter, alpha):
    for changes in ({"lora_alpha": alpha}, {"alpha_pattern": {"q_proj": alpha}}):
        (adapter / CONFIG_FILE).write_bytes(config_bytes(**changes))
        assert "q_proj" in refused(InvalidAdapter, adapter, WEIGHTS_FILE).found
        assert verified(adapter, check_finite=False)


@pytest.mark.parametrize(("side", "factor"), [("lora_A", 1e25), ("lora_B", 1e25), ("lora_B", 1e7)])
def test_weights_that_no_dtype_can_hold_are_refused(adapter, side, factor):
    tensors = weights()
    for name in tensors:
        tensors[name] *= factor if side in name else 1
    (adapter / WEIGHTS_FILE).write_bytes(safetensors(tensors))
    assert "float16" in refused(InvalidAdapter, adapter, WEIGHTS_FILE).expected
