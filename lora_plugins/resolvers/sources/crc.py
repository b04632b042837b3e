"""Cyclic redundancy checks with NumPy, for which the standard library has no function.

A CRC is linear over GF(2), so 8192 lanes of a piece are computed at once and added up, each advanced by the zero bytes
behind it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Polynomials, lowest bit first: of CRC-32/ISO-HDLC, CRC-32/ISCSI and CRC-64/NVME.
CRC32, CRC32C, CRC64NVME = 0xEDB88320, 0x82F63B78, 0x9A6C9329AC4BC9B5
_LANES, _LANE_WORDS = 8192, 8  # the fastest of six shapes from 256 KiB to 1 MiB
_WORD_BYTES = 8
_PIECE_BYTES = _LANES * _LANE_WORDS * _WORD_BYTES


class Crc:
    """A CRC of `width` bits with a polynomial whose lowest bit comes first, all ones at start, inverted at the end."""

    def __init__(self, polynomial: int, width: int) -> None:
        self._polynomial = polynomial
        self._ones = (1 << width) - 1
        self._register = self._ones
        self._digits = width // 4
        self._waiting = bytearray()

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""
        self._waiting += data
        while len(self._waiting) >= _PIECE_BYTES:
            self._add(bytes(self._waiting[:_PIECE_BYTES]))
            del self._waiting[:_PIECE_BYTES]

    def hexdigest(self) -> str:
        """The checksum of the bytes so far, in hexadecimal."""
        self._add(bytes(self._waiting))
        self._waiting.clear()
        return f"{self._register ^ self._ones:0{self._digits}x}"

    def _add(self, piece: bytes) -> None:
        if len(piece) < _WORD_BYTES:
            for byte in piece:
                self._register ^= byte
                for _ in range(8):
                    self._register = (self._register >> 1) ^ (self._polynomial if self._register & 1 else 0)
            return
        by_word, by_level = _maps(self._polynomial)
        # Zero bytes in front change no register of zero, and the register counts like the first word's bits.
        padded = np.zeros(_PIECE_BYTES, np.uint8)
        padded[-len(piece) :] = np.frombuffer(piece, np.uint8)
        first = padded[-len(piece) :][:_WORD_BYTES]
        first ^= np.frombuffer(self._register.to_bytes(_WORD_BYTES, "little"), np.uint8)
        words = np.ascontiguousarray(padded.view("<u8").reshape(_LANES, _LANE_WORDS).T)
        lanes = np.zeros(_LANES, np.uint64)
        for word in words:
            lanes = by_word(lanes ^ word)
        for advance in by_level:
            lanes = advance(lanes[0::2]) ^ lanes[1::2]
        self._register = int(lanes[0])


class _Map:
    """A linear map of 64 bits over GF(2), given by the images of the single bits, as tables by `bits` bits."""

    def __init__(self, images: NDArray[np.uint64], bits: int) -> None:
        self._type = f"<u{bits // 8}"
        self._tables = []
        for start in range(0, 64, bits):
            table = np.zeros(1, np.uint64)
            for image in images[start : start + bits]:
                table = np.concatenate([table, table ^ image])
            self._tables.append(table)

    def __call__(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        parts = np.ascontiguousarray(values, "<u8").view(self._type).reshape(-1, len(self._tables))
        found: NDArray[np.uint64] = self._tables[0][parts[:, 0]]
        for number, table in enumerate(self._tables[1:], 1):
            found ^= table[parts[:, number]]
        return found


@cache
def _maps(polynomial: int) -> tuple[_Map, list[_Map]]:
    """The register after a word, and after the zero bytes of 1, 2, 4, … lanes."""
    one = np.uint64(1)
    images = one << np.arange(64, dtype=np.uint64)
    for _ in range(64):
        images = np.where(images & one, (images >> one) ^ np.uint64(polynomial), images >> one)
    by_word = _Map(images, 16)
    for _ in range(_LANE_WORDS - 1):
        images = by_word(images)
    by_level = []
    for _ in range(_LANES.bit_length() - 1):
        by_level.append(_Map(images, 8))
        images = by_level[-1](images)
    return by_word, by_level
