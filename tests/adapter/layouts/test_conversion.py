"""An adapter in another form than the engine's is served once it is converted, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import InvalidAdapter
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import convert
from tests.make import BASE, LAYER, adapter_files, pair, put


def with_name(tensors, name="default"):
    ends = {f".lora_{side}.weight": f".lora_{side}.{name}.weight" for side in "AB"}
    return {key[: -len(end)] + ends[end]: value for key, value in tensors.items() for end in ends if key.endswith(end)}


@pytest.mark.parametrize("name", ["default", "my-adapter", "0"])
def test_the_adapters_name_is_taken_out_of_keys(tmp_path, name):
    tensors = pair(LAYER.format(0, "q_proj"), 4, 8, 8)
    verified, made, _ = convert(tmp_path, with_name(tensors, name), BASE)
    assert verified.conversion.changes == ("keys renamed (1 modules)",)
    assert made.keys() == tensors.keys()
    assert all(np.array_equal(made[key], tensors[key]) for key in tensors)


def test_two_adapters_in_one_file_are_refused(tmp_path):
    one, other = pair(LAYER.format(0, "q_proj"), 4, 8, 8), pair(LAYER.format(1, "q_proj"), 4, 8, 8)
    with pytest.raises(InvalidAdapter, match=r"several adapters in one file .*\(names in their keys: a, b\)"):
        verify_adapter(put(tmp_path, adapter_files(with_name(one, "a") | with_name(other, "b"))), BASE, Settings())
