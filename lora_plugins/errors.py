"""Every error of this package, with the code and HTTP status for clients.

```
LoRAPluginsError
├── NoFreeSlot           L001  RuntimeError       503  every slot or byte is leased
├── AdapterNotFound      L002  FileNotFoundError  404  a file that should be there is not
├── IncompatibleAdapter  L003  ValueError         400  well-formed, but not for this server
├── OutOfMemory          L004  MemoryError        507  larger than its budget
├── InvalidAdapter       L005  ValueError         400  unreadable, malformed or not allowed
├── SourceUnavailable    L006  ConnectionError    503  the source does not answer, denies, or times out
├── InvalidSettings      L007  ValueError         —    an environment variable that cannot be right
├── NotAllowed           L008  PermissionError    403  a caller who may not administer the server
├── ReplicaLost          L009  ConnectionError    503  the replica that should answer is gone
├── VersionMismatch      L010  RuntimeError       412  another version is served than If-Match names
├── PushSuperseded       L011  RuntimeError       409  a later push of the name arrived first
├── SlowBody             L012  TimeoutError       408  the body of a push comes too slowly
└── RateExceeded         L013  RuntimeError       429  more requests or tokens than a key may have
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar

# Names of arguments: another process rebuilds an error from texts under these names (`error_of`).
_FIELDS = ("found", "expected", "remedy", "adapter", "file", "place")


class LoRAPluginsError(Exception):
    """States the fault, the expectation and the remedy, for one adapter and file, if the error is about one.

    `place` is the error's path, or URL and endpoint: for the log, the command line and administrators. Other clients
    never get the place (`api/http_errors.py`); a place holds no credentials.
    """

    code: ClassVar[str] = "L000"
    http_status: ClassVar[int] = 500
    retry_after_s: int | None = None
    is_of_one_request: ClassVar[bool] = False  # another request for the same adapter may be answered otherwise at once

    def __init__(
        self,
        found: str,
        *,
        expected: str = "",
        remedy: str = "",
        adapter: str = "",
        file: str = "",
        place: str = "",
    ) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.remedy = remedy
        self.adapter = adapter
        self.file = file
        self.place = place

    def __str__(self) -> str:
        subject = ", ".join(
            part for part in (self.adapter and f"adapter '{self.adapter}'", self.file and f"file '{self.file}'") if part
        )
        text = f"[{self.code}] {subject}: found {self.found}" if subject else f"[{self.code}] found {self.found}"
        if self.place:
            text += f" at {self.place}"
        if self.expected:
            text += f"; expected {self.expected}"
        if self.remedy:
            text += f". To fix: {self.remedy}"
        # Names in adapter files are untrusted text: no forged line break in a log, nothing that UTF-8 cannot carry.
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text) + "."

    def fields(self) -> dict[str, str]:
        """Return the texts, by the names of the arguments: `type(error)(**error.fields())` is an equal error."""
        return {name: getattr(self, name) for name in _FIELDS}

    def plain(self) -> dict[str, str]:
        """Return texts for another process; `error_of` rebuilds the error, as its nearest class in this module."""
        kind = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
        return {"kind": kind, **self.fields()}

    # Exceptions pickle their positional arguments only: `found` alone would arrive.
    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.fields()), ()


class NoFreeSlot(LoRAPluginsError, RuntimeError):
    """L001: every slot or byte is leased; asking again later may succeed."""

    code = "L001"
    http_status = 503
    retry_after_s = 1
    is_of_one_request = True


class AdapterNotFound(LoRAPluginsError, FileNotFoundError):
    """L002: a file that should be there is not."""

    code = "L002"
    http_status = 404


class IncompatibleAdapter(LoRAPluginsError, ValueError):
    """L003: a well-formed adapter that this server cannot serve (rank, base model, shapes, PEFT feature)."""

    code = "L003"
    http_status = 400


class OutOfMemory(LoRAPluginsError, MemoryError):
    """L004: an adapter larger than its budget."""

    code = "L004"
    http_status = 507


class InvalidAdapter(LoRAPluginsError, ValueError):
    """L005: unreadable, truncated, malformed, non-finite, or not allowed (pickle, symlink, oversize)."""

    code = "L005"
    http_status = 400


class SourceUnavailable(LoRAPluginsError, ConnectionError):
    """L006: a source does not answer, denies, or times out; says nothing about whether the adapter exists."""

    code = "L006"
    http_status = 503
    retry_after_s = 2


class InvalidSettings(LoRAPluginsError, ValueError):
    """L007: an environment variable that cannot be right; the server does not start."""

    code = "L007"


class NotAllowed(LoRAPluginsError, PermissionError):
    """L008: a caller without the right to load, unload or see served adapters; 401 for a request without a key."""

    code = "L008"
    http_status = 403


class ReplicaLost(LoRAPluginsError, ConnectionError):
    """L009: the replica of an answer, or of a part of the answer, is gone; a second request reaches another."""

    code = "L009"
    http_status = 503
    retry_after_s = 1


class VersionMismatch(LoRAPluginsError, RuntimeError):
    """L010: another version is served than the caller's If-Match names; nothing was changed."""

    code = "L010"
    http_status = 412


class PushSuperseded(LoRAPluginsError, RuntimeError):
    """L011: a later push of the name arrived first; nothing was changed."""

    code = "L011"
    http_status = 409


class SlowBody(LoRAPluginsError, TimeoutError):
    """L012: the body of a push comes too slowly; nothing was changed."""

    code = "L012"
    http_status = 408


class RateExceeded(LoRAPluginsError, RuntimeError):
    """L013: more requests or tokens within a minute than the access policy gives a tenant's keys."""

    code = "L013"
    http_status = 429


class ErrorKind(StrEnum):
    """The subject of an error: the subject decides who remembers the error and for how long."""

    # Bytes and a base model, which never change: remembered with the digest or the version.
    VERDICT = "verdict"
    FAULT = "fault"  # now (memory, disk, time, limits, network): remembered for a moment, `is_remembered`
    ABSENCE = "absence"  # a source's answer: remembered for LORA_PLUGINS_ABSENT_TTL_S
    REFUSAL = "refusal"  # a caller or a setting, and no adapter: never remembered


# The tree's own classes; every other class has the kind of the class that it refines.
KINDS: Mapping[type[LoRAPluginsError], ErrorKind] = {
    NoFreeSlot: ErrorKind.FAULT,
    AdapterNotFound: ErrorKind.ABSENCE,
    IncompatibleAdapter: ErrorKind.VERDICT,
    OutOfMemory: ErrorKind.FAULT,
    InvalidAdapter: ErrorKind.VERDICT,
    SourceUnavailable: ErrorKind.FAULT,
    InvalidSettings: ErrorKind.REFUSAL,
    NotAllowed: ErrorKind.REFUSAL,
    ReplicaLost: ErrorKind.FAULT,
    VersionMismatch: ErrorKind.REFUSAL,
    PushSuperseded: ErrorKind.REFUSAL,
    SlowBody: ErrorKind.REFUSAL,
    RateExceeded: ErrorKind.REFUSAL,
}
_BY_NAME = {"LoRAPluginsError": LoRAPluginsError} | {kind.__name__: kind for kind in KINDS}
# For `isinstance`: errors about an adapter itself, true until the adapter changes.
OfAdapter = tuple(error for error, kind in KINDS.items() if kind in (ErrorKind.VERDICT, ErrorKind.ABSENCE))


def kind_of(error: LoRAPluginsError) -> ErrorKind:
    """Return the subject of an error; a class of another package that refines none of `KINDS` counts as a fault."""
    return next((KINDS[known] for known in type(error).__mro__ if known in KINDS), ErrorKind.FAULT)


def is_remembered(error: LoRAPluginsError) -> bool:
    """Return whether a request for the same adapter within `SourceUnavailable.retry_after_s` gets the error again."""
    return kind_of(error) is ErrorKind.FAULT and not error.is_of_one_request


def error_of(plain: dict[str, str]) -> LoRAPluginsError:
    """Return the error whose `plain()` is `plain`; keys that this release does not know are left out.

    Raises:
        KeyError: the kind or a text is missing, or this release knows no such kind.
    """
    return _BY_NAME[plain["kind"]](**{name: plain[name] for name in _FIELDS})


@contextmanager
def describing(*, adapter: str = "", file: str = "", place: str = "") -> Iterator[None]:
    """Fill in the adapter, file and place of any of our errors raised inside, where they are not set yet."""
    try:
        yield
    except LoRAPluginsError as error:
        error.adapter = error.adapter or adapter
        error.file = error.file or file
        error.place = error.place or place
        raise
