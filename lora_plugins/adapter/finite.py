"""Refuses weights with NaN, infinity, or numbers too large for the served dtypes.

Runs in the reading process (`lora_plugins/verification`) and in `lora-plugins inspect`, after the header was checked.
In go an open safetensors file and its tensors; out come the largest magnitude of each tensor, or `InvalidAdapter`.
Every byte of the file is read once, in pieces, so that memory does not grow with the file.

vLLM multiplies B by the scaling at load, in the served dtype, and adds `x A' (scaling B)'` to a layer's output. An
element of `scaling B A` is at most `rank * scaling * max|A| * max|B|`. The largest float16 is 65504, and no base
model's weight has a thousandth. Beyond 65504 sums become infinite, their differences NaN, and NaN in a key or value
reaches the next request with the same KV block (`vllm_patches/worker/model_runner.py`). Below 65504 sums may still
overflow, by the layer's input: `vllm_patches/engine_core/finite_answers.py` detects such an overflow in a running
engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import BinaryIO

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.safetensors_header import TensorInfo, floats_of
from lora_plugins.adapter.weights import BesideKind, Weights
from lora_plugins.errors import InvalidAdapter

LARGEST = 65504.0  # of float16, the narrowest served dtype

# Small enough to stay in a core's own cache: in pieces of 4 MiB, the pass takes three times as long.
_PIECE_BYTES = 1 << 18

# (Unsigned integer of the same width, infinity as such an integer.) Without the sign, larger floats are larger
# integers, and NaN is larger than infinity.
_INFINITIES: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


def check_finite(file: BinaryIO, tensors: Iterable[TensorInfo]) -> dict[str, float]:
    """Read the bytes of `tensors` from `file`, check every element, and return the largest magnitude by tensor name.

    Raises:
        InvalidAdapter: an element is NaN or infinite, or the file ends early.
    """
    import numpy as np

    buffer = memoryview(bytearray(_PIECE_BYTES))
    largest = {}
    for tensor in paced(tensors):
        kind, infinity = _INFINITIES[tensor.dtype]
        without_sign = np.array((1 << (8 * np.dtype(kind).itemsize - 1)) - 1, dtype=kind)
        file.seek(tensor.begin)
        left_bytes, largest_bits = tensor.end - tensor.begin, 0
        while left_bytes:
            piece = buffer[: min(left_bytes, _PIECE_BYTES)]
            # Python's buffered files read on until the piece is full or the file ends.
            if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                raise InvalidAdapter(
                    f"the end of the file inside tensor '{tensor.name}'",
                    expected="a file that does not change while it is read",
                    remedy="publish adapters by renaming a complete directory into place",
                )
            largest_bits = max(largest_bits, int((np.frombuffer(piece, dtype=kind) & without_sign).max()))
            if largest_bits >= infinity:
                raise InvalidAdapter(
                    f"NaN or infinity in tensor '{tensor.name}'",
                    expected="finite weights",
                    remedy="train or convert the adapter again; this one would answer with garbage",
                )
            left_bytes -= len(piece)
        largest[tensor.name] = float(floats_of(np.array([largest_bits], dtype=kind), tensor.dtype)[0])
    return largest


def check_magnitudes(weights: Weights, config: AdapterConfig, largest: Mapping[str, float]) -> None:
    """Compare the largest magnitudes of an adapter with the range of every served dtype.

    Raises:
        InvalidAdapter: A, B with its scaling, their product, or what is beside them may be larger.
    """
    for one in weights.beside:
        if (number := largest[one.tensor.name]) > LARGEST:
            raise InvalidAdapter(
                f"numbers up to {number:.2g} in '{one.tensor.name}'",
                expected=f"at most {LARGEST:.0f}, which float16 can hold",
                remedy="train the adapter again; this one would answer with garbage",
            )
    factors = {one.module: largest[one.tensor.name] for one in weights.beside if one.kind is BesideKind.SINGULAR}
    for pair in paced(weights.pairs):
        scaling = abs(config.scaling(pair.rank, pair.alpha))
        a, b = largest[pair.a.name] * factors.get(pair.module, 1), largest[pair.b.name]
        # Each factor alone is an operand in the served dtype, so each must fit by itself.
        worst = max(a, scaling, scaling * b, pair.rank * a * scaling * b)
        if worst > LARGEST:
            raise InvalidAdapter(
                f"numbers up to {worst:.2g} in '{pair.module}' (scaling {scaling:.2g}, max|A| {a:.2g}, max|B| {b:.2g})",
                expected=f"at most {LARGEST:.0f}, which float16 can hold, in A, scaling * B and rank * A * scaling * B",
                remedy="correct lora_alpha, or train the adapter again; this one would answer with garbage",
            )
