"""Values: NaN, infinity and numbers too large for a served dtype are found, and every other value is let through."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter import finite
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.finite import check_finite
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import InvalidAdapter
from tests.adapter.verdicts import refused, verified
from tests.make import config_bytes, safetensors, weights

WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
KIND = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2"}
# Bit patterns: infinity, minus infinity, quiet NaN, signalling NaN, minus NaN with every bit set.
NOT_FINITE = {
    "F64": [0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8 << 48, (0x7FF0 << 48) + 1, (1 << 64) - 1],
    "F32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF],
    "F16": [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF],
    "BF16": [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF],
}
# Zero, minus zero, the smallest subnormal, the largest value, and its negative.
FINITE = {
    "F64": [0, 1 << 63, 1, 0x7FEF_FFFF_FFFF_FFFF, 0xFFEF_FFFF_FFFF_FFFF],
    "F32": [0, 1 << 31, 1, 0x7F7FFFFF, 0xFF7FFFFF],
    "F16": [0, 1 << 15, 1, 0x7BFF, 0xFBFF],
    "BF16": [0, 1 << 15, 1, 0x7F7F, 0xFF7F],
}
PIECE_BYTES = 64
dtypes = pytest.mark.parametrize("dtype", WIDTH)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(finite, "_PIECE_BYTES", PIECE_BYTES)


def check(dtype: str, bits: np.ndarray, before: bytes = b"") -> None:
    data = before + bits.astype(KIND[dtype]).tobytes()
    check_finite(io.BytesIO(data), [TensorInfo("the_tensor", dtype, (len(bits),), len(before), len(data))])


@dtypes
def test_nan_and_infinity_are_found_beside_finite_extremes(dtype):
    check(dtype, np.array(FINITE[dtype], dtype="u8"))
    for bits in NOT_FINITE[dtype]:
        with pytest.raises(InvalidAdapter, match="NaN or infinity in tensor 'the_tensor'"):
            check(dtype, np.array([*FINITE[dtype], bits], dtype="u8"))


@dtypes
def test_it_is_found_at_every_position(dtype, small_pieces):
    # Three pieces and a bit: the first, the last, and both sides of each piece's boundary are among these.
    count = 3 * PIECE_BYTES // WIDTH[dtype] + 1
    bits = np.zeros(count, dtype="u8")
    check(dtype, bits)
    for position in range(count):
        bits[position] = NOT_FINITE[dtype][3]
        with pytest.raises(InvalidAdapter):
            check(dtype, bits, before=b"head")
        bits[position] = 0


def test_only_the_tensors_own_bytes_are_looked_at():
    ones = b"\xff" * 8
    data = ones + b"\0" * 8 + ones
    between = TensorInfo("a", "F32", (2,), 8, 16)
    check_finite(io.BytesIO(data), [between])  # lets it through
    for begin in (0, 16):
        with pytest.raises(InvalidAdapter, match="'b'"):
            check_finite(io.BytesIO(data), [between, TensorInfo("b", "F32", (2,), begin, begin + 8)])


@dtypes
def test_the_largest_magnitude_is_returned(dtype):
    bits = {"F64": 0xC004 << 48, "F32": 0xC0200000, "F16": 0xC100, "BF16": 0xC020}  # -2.5
    values = np.array([bits[dtype], 0, 1], dtype="u8")
    data = values.astype(KIND[dtype]).tobytes()
    tensor = TensorInfo("one", dtype, (3,), 0, len(data))
    assert check_finite(io.BytesIO(data), [tensor]) == {"one": 2.5}


@pytest.mark.parametrize("length", [0, 3, 64, 100])
def test_a_file_that_ends_early_is_refused(length, small_pieces):
    with pytest.raises(InvalidAdapter, match="end of the file inside tensor 'a'"):
        check_finite(io.BytesIO(b"\0" * length), [TensorInfo("a", "F32", (32,), 0, 128)])


class _Drops(io.BytesIO):
    """Gives at most three bytes at a time, as a network file system may."""

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:3])


def test_short_reads_are_no_end_of_the_file():
    data = np.array([1, 2, 3, np.inf], "<f4").tobytes()
    check_finite(io.BufferedReader(_Drops(data)), [TensorInfo("a", "F32", (3,), 0, 12)])
    with pytest.raises(InvalidAdapter, match="NaN or infinity"):
        check_finite(io.BufferedReader(_Drops(data)), [TensorInfo("a", "F32", (4,), 0, 16)])


@dtypes
@given(st.data())
def test_numpy_agrees_about_any_bits(dtype, data):
    bits = np.array(
        data.draw(st.lists(st.integers(0, (1 << 8 * WIDTH[dtype]) - 1), min_size=1, max_size=6)), dtype="u8"
    )
    # bfloat16 is the upper half of a float32.
    wide = (bits << 16 if dtype == "BF16" else bits).astype("<u4" if dtype == "BF16" else KIND[dtype])
    values = wide.view({"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<f4"}[dtype])
    try:
        check(dtype, bits)
    except InvalidAdapter:
        assert not np.isfinite(values).all()
    else:
        assert np.isfinite(values).all()


@pytest.mark.parametrize("alpha", [1e30, 1e300, -1e30])
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
