"""Names that nobody has, to be asked for in the place of names that one may not use.

A decoy goes the whole way of a name that does not exist: the same sources are asked, and their "no such adapter" is
remembered alike. It depends on the name and on what the key may use, never on what there is.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator

from lora_plugins.adapter.names import MAX_CHARACTERS, AdapterName
from lora_plugins.api.access.policy import Principal
from lora_plugins.errors import AdapterNotFound

_RANDOM_CHARACTERS = 16  # at least: 75 bits
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
_HEX_LETTERS = "abcdef"
# vLLM takes what looks like a file's path out of its error texts; a decoy must come through whole.
_UNLIKE_A_PATH = re.compile(r"(?!(?:home|usr|opt|var|tmp|root|lib|mnt|srv)$)[A-Za-z0-9_-]+")


class Decoys:
    """Decoys of one process; the same name has the same one, and nobody outside can tell which."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def of(self, name: str, principal: Principal) -> str:
        """A name of the same shape that no adapter has; a malformed name has a malformed one.

        The folders that the principal's own patterns spell out stay, so that a source which knows its adapters by
        folder or owner is asked as for a name of theirs that does not exist. Every other segment is replaced.
        """
        letters = self._letters(name)
        try:
            parsed = AdapterName.parse(name)
        except AdapterNotFound:
            length = min(max(len(name), _RANDOM_CHARACTERS + 1), MAX_CHARACTERS + 1)
            return "-" + "".join(_pick(letters, _LETTERS) for _ in range(length - 1))
        kept = _kept(parsed.segments, principal)
        replaced = ["".join(_pick(letters, _LETTERS) for _ in segment) for segment in parsed.segments[len(kept) :]]
        lacking = _RANDOM_CHARACTERS - sum(map(len, replaced))
        replaced[-1] += "".join(_pick(letters, _LETTERS) for _ in range(lacking))
        decoy = "/".join((*kept, *replaced))
        if parsed.revision is not None:
            room = MAX_CHARACTERS - len(decoy) - 1
            decoy += "@" + "".join(_like(character, letters) for character in parsed.revision[:room]).rstrip("/")
        return decoy

    def _letters(self, name: str) -> Iterator[int]:
        """Bytes without end that only this process can foresee."""
        seed = hmac.digest(self._secret, name.encode("utf-8", "surrogatepass"), "sha256")
        block = 0
        while True:
            yield from hashlib.sha512(seed + block.to_bytes(4, "big")).digest()
            block += 1


def _kept(segments: tuple[str, ...], principal: Principal) -> tuple[str, ...]:
    longest: tuple[str, ...] = ()
    for pattern in principal.patterns:
        common = []
        for mine, asked in zip(pattern.spelled_out, segments[:-1], strict=False):
            if mine != asked or _UNLIKE_A_PATH.fullmatch(mine) is None:
                break
            common.append(mine)
        longest = max(longest, tuple(common), key=len)
    # A decoy is no longer than a name may be.
    return longest if sum(map(len, longest)) + len(longest) <= MAX_CHARACTERS - 2 * _RANDOM_CHARACTERS else ()


def _like(character: str, letters: Iterator[int]) -> str:
    """A revision may be a digest or a commit, which are looked up in another way than a branch."""
    if character == "/":
        return character
    for kind in (_DIGITS, _HEX_LETTERS):
        if character in kind:
            return _pick(letters, kind)
    return _pick(letters, _LETTERS)


def _pick(letters: Iterator[int], among: str) -> str:
    return among[next(letters) % len(among)]
