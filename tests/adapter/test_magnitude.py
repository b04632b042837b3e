"""Numbers so large that no served dtype holds what is computed with them."""

from __future__ import annotations

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.verify import VerifiedAdapter, verify_adapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import (
    InvalidAdapter,
    LoRAPluginsError,
)
from lora_plugins.settings import Settings
from tests.make import (
    BASE,
    adapter_files,
    config_bytes,
    put,
    safetensors,
    weights,
)


def verified(directory, **changes: object) -> VerifiedAdapter:
    return verify_adapter(directory, BASE, Settings(**changes))


def refused(kind: type[LoRAPluginsError], directory, file: str, **changes: object) -> LoRAPluginsError:
    with pytest.raises(kind) as caught:
        verified(directory, **changes)
    error = caught.value
    assert type(error) is kind
    assert error.file == file
    for part in (error.found, error.expected, error.remedy, f"[{kind.code}]", f"'{file}'"):
        assert part
        assert part in str(error)
    return error


@pytest.fixture
def adapter(tmp_path):
    return put(tmp_path / "sql", adapter_files())


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
