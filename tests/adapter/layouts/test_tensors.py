"""A pair that is made of others is named and sized as the engine reads it."""

from __future__ import annotations

from lora_plugins.adapter.layouts.moves import Same, Stacked
from lora_plugins.adapter.layouts.tensors import new_pair
from lora_plugins.adapter.safetensors_header import TensorInfo


def test_a_new_pair_has_the_engines_names() -> None:
    a = TensorInfo("x.lora_A.weight", "BF16", (4, 8), 0, 64)
    b = [TensorInfo(f"{part}.lora_B.weight", "BF16", (8, 4), 0, 64) for part in ("x", "y")]
    made = new_pair("layers.0.qkv_proj", ([a], (4, 8), Same()), (b, (16, 4), Stacked()), 4, 8.0)
    assert made.pair.names == (made.a.info.name, made.b.info.name)
    assert made.a.info.name.endswith("layers.0.qkv_proj.lora_A.weight")
    assert (made.b.info.dtype, made.b.info.shape, made.b.sources) == ("BF16", (16, 4), tuple(b))
    assert (made.pair.rank, made.pair.alpha) == (4, 8.0)
