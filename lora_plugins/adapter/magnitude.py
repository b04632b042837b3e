"""Whether an adapter's numbers are so large that computed values leave the range of the engine's dtypes.

vLLM multiplies B by the scaling at load, in the served dtype, and adds `x A' (scaling B)'` to a layer's output. An
element of `scaling B A` is at most `rank * scaling * max|A| * max|B|`. The largest float16 is 65504, and no base
model's weight has a thousandth. Beyond 65504 sums become infinite, their differences NaN, and NaN in a key or value
reaches the next request with the same KV block (`vllm_patches/worker/model_runner.py`). Below 65504 sums may still
overflow, by the layer's input: `vllm_patches/engine_core/finite_answers.py` detects such an overflow in a running
engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.pace import paced
from lora_plugins.adapter.weights import LoraPair
from lora_plugins.errors import InvalidAdapter

LARGEST = 65504.0  # of float16, the narrowest served dtype


def check_magnitudes(pairs: Iterable[LoraPair], config: AdapterConfig, largest: Mapping[str, float]) -> None:
    """Compare the largest magnitudes of each pair with the range of every served dtype.

    Raises:
        InvalidAdapter: A, B with its scaling, or their product may be larger.
    """
    for pair in paced(pairs):
        scaling = abs(config.scaling(pair.rank, pair.alpha))
        a, b = largest[pair.a.name], largest[pair.b.name]
        worst = max(a, scaling, scaling * b, pair.rank * a * scaling * b)
        if worst > LARGEST:
            raise InvalidAdapter(
                f"numbers up to {worst:.2g} in '{pair.module}' (scaling {scaling:.2g}, max|A| {a:.2g}, max|B| {b:.2g})",
                expected=f"at most {LARGEST:.0f}, which float16 can hold, in A, scaling * B and rank * A * scaling * B",
                remedy="correct lora_alpha, or train the adapter again; this one would answer with garbage",
            )
