"""Checksums of whole objects, as object stores keep them: SHA-256, CRC-32, CRC-32C and CRC-64/NVME.

S3 keeps a CRC-64/NVME of every object whose client sends no other checksum. The standard library has CRC-32 only; for
the others see `crc.py`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lora_plugins.store.hashing import Digest

# Polynomials of CRC-32/ISCSI and CRC-64/NVME, lowest bit first.
CRC32C, CRC64NVME = 0x82F63B78, 0x9A6C9329AC4BC9B5
_MD5_ETAG = re.compile(r'"?([0-9a-fA-F]{32})"?')


@dataclass(frozen=True, slots=True)
class Checksum:
    """The checksum of a file's bytes: `value` in hexadecimal, of `algorithm`, as `said_by` states."""

    algorithm: str
    value: str
    said_by: str

    def digest(self) -> Digest:
        """A digest of no bytes yet."""
        return _ALGORITHMS[self.algorithm]()

    @classmethod
    def of_etag(cls, etag: str) -> Checksum | None:
        """The MD5 that an ETag looks like; None for another ETag, as of an upload in parts."""
        found = _MD5_ETAG.fullmatch(etag)
        return cls("MD5", found[1].lower(), "the object's ETag") if found else None

    @classmethod
    def of_answer(cls, answer: Mapping[str, Any]) -> Checksum | None:
        """The checksum of the whole object in S3's answer to a HEAD; None where S3 keeps none.

        A checksum of type COMPOSITE is one of the parts' checksums, and says nothing of the bytes without the parts.
        """
        if answer.get("ChecksumType") != "FULL_OBJECT":
            return None
        for algorithm in _KEPT:
            try:
                value = base64.b64decode(answer.get(f"Checksum{algorithm}", ""), validate=True).hex()
            except binascii.Error:
                continue
            if len(value) == len(_ALGORITHMS[algorithm]().hexdigest()):
                return cls(algorithm, value, "the object's checksum")
        return None


class _Crc32:
    """CRC-32 by zlib, as a digest."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _crc(polynomial: int, width: int) -> Digest:
    from lora_plugins.resolvers.sources.crc import Crc  # late: only objects with such a checksum need NumPy

    return Crc(polynomial, width)


_ALGORITHMS: Mapping[str, Callable[[], Digest]] = {
    "MD5": partial(hashlib.md5, usedforsecurity=False),
    "SHA256": hashlib.sha256,
    "CRC64NVME": partial(_crc, CRC64NVME, 64),
    "CRC32": _Crc32,
    "CRC32C": partial(_crc, CRC32C, 32),
}
# What S3 keeps of whole objects, under these names.
_KEPT = ("SHA256", "CRC64NVME", "CRC32", "CRC32C")
