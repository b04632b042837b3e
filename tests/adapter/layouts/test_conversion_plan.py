"""An adapter in another form than the engine's is served once it is converted, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from lora_plugins.adapter.config import CONFIG_FILE, parse_config
from lora_plugins.adapter.layouts.tensors import Move, Part, Placed, new_pair
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import MLP, PARTS, base_of, convert
from tests.adapter.verdicts import refusal
from tests.make import BASE, LAYER, MODULES, adapter_files, pair, put, sharded, weights


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
    says = r"several adapters in one file .*\(names in their keys: a, b\)"
    refusal(tmp_path, with_name(one, "a") | with_name(other, "b"), kind=InvalidAdapter, says=says)


def test_a_name_of_another_transformers_version_is_respelled(tmp_path):
    tensors = pair(LAYER.format(0, "q_proj").replace("self_attn", "attention"), 4, 8, 8)
    respell = (lambda module: module.replace(".attention.", ".self_attn."),)
    base = base_of(MODULES.places, respell)
    verified, made, _ = convert(tmp_path, tensors, base)
    assert list(made) == list(pair(LAYER.format(0, "q_proj"), 4, 8, 8))
    assert verified.conversion.changes == ("keys renamed (1 modules)",)
    refusal(tmp_path, tensors, kind=IncompatibleAdapter)


def test_no_rule_touches_what_has_no_place(tmp_path):
    tensors = pair(MLP.format(0, "gate_up_proj"), 4, 8, 24) | pair("encoder.q_proj", 4, 8, 8)
    base = base_of({**MODULES.places, **PARTS})
    original = put(tmp_path, adapter_files(tensors))
    with pytest.raises(IncompatibleAdapter, match="1 of 3 modules that the model does not have, such as 'encoder"):
        verify_adapter(original, base, Settings())
    assert verify_adapter(original, base, Settings(unmatched="warn")).notes


def test_what_lands_is_kept_beside_what_is_converted(tmp_path):
    tensors = pair(LAYER.format(0, "q_proj"), 4, 8, 8) | pair(MLP.format(1, "gate_up_proj"), 4, 8, 24)
    verified, made, _ = convert(tmp_path, tensors, base_of({**MODULES.places, **PARTS}))
    assert {key for key in made if "self_attn" in key} == {key for key in tensors if "self_attn" in key}
    assert all(np.array_equal(made[key], tensors[key]) for key in tensors if "self_attn" in key)
    assert len(verified.conversion.weights.pairs) == 3


def test_several_files_become_one(tmp_path):
    files = sharded(adapter_files())
    verified, made, target = convert(tmp_path, None, BASE, files=files)
    assert verified.conversion.changes == ("2 files of weights joined into one",)
    assert made.keys() == weights().keys()
    assert all(np.array_equal(made[name], array) for name, array in weights().items())
    assert parse_config((target / CONFIG_FILE).read_bytes()) == parse_config(files[CONFIG_FILE])


ONE, TWO = np.array([[1, 2], [3, 4]], np.uint16), np.array([[5, 6], [7, 8]], np.uint16)
PLACE = ((0, 2, 1), (0, 2, 1))


@pytest.mark.parametrize(
    ("move", "sources", "expected"),
    [
        (Part(), [ONE], [[1, 2], [3, 4]]),
        (Part(((1, 2, 1),)), [ONE], [[3, 4]]),
        (Part((), (1, 4), (1, 0)), [ONE], [[1], [2], [3], [4]]),
        (Part(((1, 2, 1), (0, 2, 1)), (2, 2, 2), (2, 0, 1)), [np.arange(8).reshape(2, 4)], [[[1, 3], [5, 7]]]),
        (Part(((0, 1, 1), (0, 4, 2)), (1, 4, 2), (0, 1, 2)), [np.arange(8).reshape(2, 4)], [[[0, 1], [4, 5]]]),
        (Placed((1, 2)), [ONE], [[0, 0]]),
        (Placed((4, 2), (((0, 2, 1),), ((2, 4, 1),))), [ONE, TWO], [[1, 2], [3, 4], [5, 6], [7, 8]]),
        (Placed((3, 4), (PLACE, ((2, 3, 1), (2, 4, 1)))), [ONE, TWO[:1]], [[1, 2, 0, 0], [3, 4, 0, 0], [0, 0, 5, 6]]),
        (Placed((2, 1, 2), (((1, 2, 1),), ((0, 1, 1),))), [ONE[:1], TWO[:1]], [[[5, 6]], [[1, 2]]]),
        (
            Placed((4, 1, 2), (((1, 4, 2), (0, 1, 1), (1, 2, 1)),)),
            [ONE[:, :1]],
            [[[0, 0]], [[0, 1]], [[0, 0]], [[0, 3]]],
        ),
    ],
    ids=lambda it: type(it).__name__ if callable(it) else "",
)
def test_elements_lie_where_the_move_says(move: Move, sources: list[np.ndarray], expected: list[list[int]]) -> None:
    made = move(sources)
    assert made.tolist() == expected
    assert made.dtype == sources[0].dtype


def test_a_new_pair_has_the_engines_names() -> None:
    a = TensorInfo("x.lora_A.weight", "BF16", (4, 8), 0, 64)
    b = [TensorInfo(f"{part}.lora_B.weight", "BF16", (8, 4), 0, 64) for part in ("x", "y")]
    made = new_pair("layers.0.qkv_proj", ([a], (4, 8), Part()), (b, (16, 4), Placed((16, 4))), 4, 8.0)
    assert made.pair.names == (made.a.info.name, made.b.info.name)
    assert made.a.info.name.endswith("layers.0.qkv_proj.lora_A.weight")
    assert (made.b.info.dtype, made.b.info.shape, made.b.sources) == ("BF16", (16, 4), tuple(b))
    assert (made.pair.rank, made.pair.alpha) == (4, 8.0)
