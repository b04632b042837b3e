"""Checksums of whole objects, as object stores keep them: SHA-256, CRC-32, CRC-32C and CRC-64/NVME.

Used by `s3.py`, which reads the checksum that S3 states, and by `ranges.py`, which computes the digest of the bytes
while they arrive. S3 keeps a CRC-64/NVME of every object whose client sends no other checksum. AWS's own library,
`awscrt`, computes the cyclic redundancy checks, 8 GB a second; the standard library has only CRC-32.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lora_plugins.store.hashing import Digest

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


class _Crc:
    """A cyclic redundancy check of `awscrt` as a digest, with so many hexadecimal digits."""

    def __init__(self, name: str, digits: int) -> None:
        from awscrt import checksums  # late: other object stores than S3 need none

        self._compute: Callable[[bytes | memoryview, int], int] = getattr(checksums, name)
        self._digits = digits
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = self._compute(data, self._value)  # goes on from the check of the bytes before

    def hexdigest(self) -> str:
        return f"{self._value:0{self._digits}x}"


_ALGORITHMS: Mapping[str, Callable[[], Digest]] = {
    "MD5": partial(hashlib.md5, usedforsecurity=False),
    "SHA256": hashlib.sha256,
    "CRC64NVME": partial(_Crc, "crc64nvme", 16),
    "CRC32": partial(_Crc, "crc32", 8),
    "CRC32C": partial(_Crc, "crc32c", 8),
}
# What S3 keeps of whole objects, under these names.
_KEPT = ("SHA256", "CRC64NVME", "CRC32", "CRC32C")
