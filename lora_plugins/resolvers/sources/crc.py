"""Cyclic redundancy checks with NumPy, for which the standard library has no function.

A CRC is linear over GF(2): the words of a piece are added up in pairs, each first word advanced by the zero bytes
behind it, until one word is left.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORD_BYTES = 8
_LEVELS = 14  # the fastest of 11 to 15
_PIECE_BYTES = _WORD_BYTES << _LEVELS


class Crc:
    """A CRC of `width` bits with a polynomial whose lowest bit comes first, all ones at start, inverted at the end."""

    def __init__(self, polynomial: int, width: int) -> None:
        self._polynomial = polynomial
        self._ones = self._register = (1 << width) - 1
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
        # Zero bytes in front change no register of zero, and the register counts like the first word's bits.
        start = self._register.to_bytes(_WORD_BYTES, "little")
        first = bytes(one ^ other for one, other in zip(piece, start, strict=False))
        padded = (first + piece[_WORD_BYTES:]).rjust(_PIECE_BYTES, b"\0")
        words, maps = np.frombuffer(padded, "<u8"), _maps(self._polynomial)
        for advance in maps[:-1]:
            words = _mapped(advance, words[0::2]) ^ words[1::2]
        self._register = self._register >> 8 * len(piece) ^ int(_mapped(maps[0], words)[0])


def _mapped(tables: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The images of values under a linear map of 64 bits over GF(2), given by the images of each byte."""
    found = np.zeros(len(values), np.uint64)
    for table, part in zip(tables, np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(-1, 8).T, strict=True):
        found ^= table.take(part)
    return found


@cache
def _maps(polynomial: int) -> list[NDArray[np.uint64]]:
    """What a register becomes after the zero bytes of 1, 2, 4, … words."""
    one = np.uint64(1)
    images = one << np.arange(64, dtype=np.uint64)  # of the single bits
    for _ in range(64):
        images = np.where(images & one, (images >> one) ^ np.uint64(polynomial), images >> one)
    maps = []
    for _ in range(_LEVELS + 1):
        tables = np.zeros((_WORD_BYTES, 256), np.uint64)
        for bit, image in enumerate(images):
            size = 1 << bit % 8
            tables[bit // 8, size : 2 * size] = tables[bit // 8, :size] ^ image
        maps.append(tables)
        images = _mapped(tables, images)
    return maps
