"""Environment variables: the kinds of their values, how a dataclass field declares a variable, and misspelt names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from lora_plugins.errors import InvalidSettings

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

PREFIX = "LORA_PLUGINS_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
# As Kubernetes writes them, with and without the final B: Ki is 1024, K is 1000.
_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
# For every text that `bytes_of` reads.
SIZE_EXPECTED = "a number of bytes above 0, such as 1048576, 500M, 1.5GB, 20Gi or 20GiB"


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value.

    Attributes:
        expected: the form of a text, for error messages.
        parse: the value of a text; raises ValueError where the text is not as expected.
        none: the documentation's word for no value.
        blank_is_unset: whether an empty text stands for the default, instead of being parsed.
        is_secret: whether no error and no representation may hold the text.
    """

    expected: str
    parse: Callable[[str], T]
    none: str = "none"
    blank_is_unset: bool = True
    is_secret: bool = False


def bytes_of(text: str) -> int | None:
    """Read a positive number of bytes such as `20Gi`, `1.5GiB`, `500MB` or `1024`; None for any other text."""
    match = re.fullmatch(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?\s*([a-z]*)", text.strip().lower())
    if match is None or match[3] not in _UNITS or (match[2] and _UNITS[match[3]] == 1):
        return None
    tenths = match[2] or ""
    # In integers: a float would round 1.1Gi, and 18 digits times Ti exceed its 53 bits.
    return int(match[1] + tenths) * _UNITS[match[3]] // 10 ** len(tenths) or None


def _accept(value: T, *, accepted: bool) -> T:
    if not accepted:
        raise ValueError(value)
    return value


def _flag(text: str) -> bool:
    word = text.strip().lower()
    return _accept(word in _TRUE, accepted=word in _TRUE | _FALSE)


def _restore(text: str) -> str:
    word = text.strip().lower()
    return word if word == "living" else str(int(_flag(word)))


def _bytes(text: str) -> int:
    value = bytes_of(text)
    return _accept(value or 0, accepted=value is not None)


def _labelled(text: str) -> float | Path:
    word = text.strip()
    if word.casefold() == "all":
        return math.inf
    # `int` alone would take "1_000", "+1" and digits of other scripts.
    return int(word) if re.fullmatch("[0-9]{1,6}", word) else _existing_file(word)


def _path(text: str) -> Path:
    # A container's user without an entry in passwd has HOME=/, where nothing may be written.
    _accept(text, accepted=not text.startswith("~/") or os.path.expanduser("~") != "/")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # ~ of a user that does not exist
        raise ValueError(text) from error


def _existing_file(text: str) -> Path:
    return _accept(_path(text), accepted=_path(text).is_file())


def _key(text: str) -> str:
    return _accept(text, accepted=bool(text) and text.isascii() and text.isprintable() and " " not in text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def member(kind: type[E]) -> Kind[E]:
    return Kind("one of " + ", ".join(kind), lambda text: kind(text.strip().lower()), blank_is_unset=False)


def choice(*choices: str) -> Kind[str]:
    """Return the kind whose values are `choices`."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        return _accept(word, accepted=word in choices)

    return Kind(" or ".join(choices), parse)


def order(*choices: str) -> Kind[tuple[str, ...]]:
    """Return the kind of some of `choices`, separated by commas; all choices where none is named."""

    def parse(text: str) -> tuple[str, ...]:
        named = _names(text) or choices
        return _accept(named, accepted=len(set(named)) == len(named) and set(named) <= set(choices))

    return Kind("each at most once, of " + ", ".join(choices), parse)


def seconds(least: float) -> Kind[float]:
    """Return the kind of a number of seconds, a day at most."""

    def parse(text: str) -> float:
        value = float(text)
        # The range refuses NaN too: NaN compares false.
        return _accept(value, accepted=least <= value <= 86_400)

    return Kind(f"seconds, from {least:g} to 86400", parse, blank_is_unset=False)


FLAG = Kind("1 or 0", _flag)
RESTORE = Kind("1, 0 or living", _restore)
LABELLED = Kind("a number, 0 to 999999, or all, or a file of names that exists", _labelled)
BYTES = Kind(SIZE_EXPECTED, _bytes, none="no limit", blank_is_unset=False)
NAMES = Kind("names, separated by commas", _names)
TEXT = Kind("text", str)
PATH = Kind("a path of this machine", _path)
PATHS = Kind("paths of this machine, separated by commas", lambda text: tuple(map(_path, _names(text))))
FILE = Kind("a file that exists", _existing_file)
# An empty key is an error: a secret that was not mounted must not open what the key was to close.
KEY = Kind("printable ASCII without spaces, which a header can carry", _key, blank_is_unset=False, is_secret=True)
# As vLLM reads its own flag (vllm/envs.py): an unknown text means no, and is never an error.
VLLM_FLAG = Kind("1 or 0", lambda text: text.strip().lower() in {"1", "true"})


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable; `default` is the default's text, None without a text."""

    name: str
    kind: Kind[Any]
    default: str | None

    @property
    def is_ours(self) -> bool:
        """Whether the variable is this package's, and not vLLM's."""
        return self.name.startswith(PREFIX)

    def value(self, text: str | None) -> Any:
        """Return the value of a text of the environment; the default for None.

        Raises:
            InvalidSettings: the text is not of the variable's kind.
        """
        is_unset = text is None or (self.kind.blank_is_unset and not text.strip())
        text = self.default if is_unset else text
        if text is None:
            return None
        try:
            return self.kind.parse(text)
        except ValueError:
            if is_unset:  # of all defaults, only a path below the home directory can fail
                found = f"no home directory for the default of {self.name}"
                raise InvalidSettings(found, expected=self.kind.expected, remedy=f"set {self.name}") from None
            # `from None`: the ValueError's text would show a key.
            raise InvalidSettings(
                f"{self.name}=…, which cannot be a key" if self.kind.is_secret else f"{self.name}={text!r}",
                expected=self.kind.expected,
                remedy=f"correct or unset {self.name}",
            ) from None


def required(name: str, kind: Kind[T], default: str) -> T:
    """Declare a dataclass field with a value in every case."""
    variable = Variable(name, kind, default)
    return cast(T, field(default_factory=lambda: variable.value(None), metadata={"variable": variable}))


def optional(name: str, kind: Kind[T]) -> T | None:
    """Declare a dataclass field that is None unless its variable is set."""
    variable = Variable(name, kind, None)
    return cast(T | None, field(default=None, repr=not kind.is_secret, metadata={"variable": variable}))


def closest(name: str, known: Iterable[str], least: float = 0.75) -> str | None:
    """Return the name in `known` closest to `name`, letter case aside; None where none is alike by `least`, of 1."""
    by_folded = {one.casefold(): one for one in sorted(known, reverse=True)}
    found = get_close_matches(name.casefold(), by_folded, n=1, cutoff=least)
    return by_folded[found[0]] if found else None
