"""Why a remote source has no answer: one classification of HTTP statuses and transport failures for all of them.

A client library adds a table of its own exceptions (`hub/errors.py`, `object_store/errors.py`), and a test fails on an
exception type of it that has no kind. Unknown failures are never retried and never taken for "no such adapter".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, SourceUnavailable
from lora_plugins.resolvers.sources.source import VersionChanged

_MAX_WAIT_S = 30.0


class FailureKind(Enum):
    """A kind of failure: what was found (`{source}` is the kind of source), what to do, and whether to retry."""

    MISSING = ("no such object", "upload the adapter again", False)
    NO_BUCKET = ("no such bucket", "create the bucket or correct the URL template", False)
    CHANGED = ("an object that changed meanwhile", "ask again", False)
    HIDDEN = ("a repository that is missing or private", "check its name", False)
    GATED = ("a gated repository", "accept its terms on its page on the Hub", False)
    OFFLINE = ("offline mode", "unset HF_HUB_OFFLINE, or run 'hf download' where there is a network", False)
    DENIED = ("{source} that denies access", "grant the credentials the right to list and read", False)
    EXPIRED = ("credentials that have expired", "renew the credentials", False)
    NO_CREDENTIALS = ("no usable credentials", "provide credentials to the server, or set anonymous access", False)
    BAD_REQUEST = ("a request that cannot be made", "check endpoint, region and client configuration", False)
    REFUSED = ("{source} that refuses the request", "check endpoint, region and bucket", False)
    TLS = ("a TLS connection that cannot be trusted", "check the endpoint's certificate and the CA bundle", False)
    BUSY = ("{source} that asks to slow down", "ask again later", True)
    SERVER = ("{source} that fails", "ask again later; look at its health", True)
    TIMEOUT = ("{source} that does not answer in time", "check the network and the endpoint", True)
    UNREACHABLE = ("{source} that cannot be reached", "check the network and the endpoint", True)
    BROKEN_ANSWER = ("an answer that broke off or is malformed", "check endpoint, proxies and firewalls", True)
    UNKNOWN = ("an unexpected failure of the client of {source}", "look at the server's log", False)

    def __init__(self, found: str, remedy: str, is_retryable: bool) -> None:
        self.found = found
        self.remedy = remedy
        self.is_retryable = is_retryable


class RemoteFailure(SourceUnavailable):
    """A remote source did not answer; asking again at once would not help."""

    kind = FailureKind.UNKNOWN


class Transient(RemoteFailure):
    """A failure that may pass by itself; `wait_s` is how long the source asks us to wait, where it does."""

    wait_s: float | None = None


class BrokenAnswer(Exception):
    """A body, header or file that is not what was asked for: short, long, of another range, or damaged."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What is wrong; `detail` is the HTTP status or exception type that shows it."""

    kind: FailureKind
    detail: str = ""
    retry_after_s: float | None = None

    def as_error(
        self, source: str, *, found: str = "", expected: str = "the adapter's files", remedy: str = "", file: str = ""
    ) -> LoRAPluginsError:
        """Our error: AdapterNotFound, VersionChanged, or a RemoteFailure, which is Transient where retries may help.

        `found` and `remedy` take the place of what the kind says.
        """
        kind = self.kind
        text = found or kind.found.format(source=source)
        text = f"{text} ({self.detail})" if self.detail else text
        remedy = remedy or kind.remedy
        if kind is FailureKind.MISSING:
            return AdapterNotFound(text, expected=expected, remedy=remedy, file=file)
        if kind is FailureKind.CHANGED:
            return VersionChanged(text, expected=expected, remedy=remedy, file=file)
        error_type = Transient if kind.is_retryable else RemoteFailure
        error = error_type(text, expected=expected, remedy=remedy, file=file)
        error.kind = kind
        if isinstance(error, Transient) and self.retry_after_s:
            error.wait_s = min(self.retry_after_s, _MAX_WAIT_S)
        return error


# Names as `kind_of` makes them, so that no library is imported to recognise an error of it.
_STANDARD = {
    "lora_plugins.BrokenAnswer": FailureKind.BROKEN_ANSWER,
    "http.RemoteDisconnected": FailureKind.UNREACHABLE,
    "http.InvalidURL": FailureKind.BAD_REQUEST,
    "http.HTTPException": FailureKind.BROKEN_ANSWER,
    "socket.gaierror": FailureKind.UNREACHABLE,
    "ssl.SSLCertVerificationError": FailureKind.TLS,
    "ssl.SSLZeroReturnError": FailureKind.UNREACHABLE,
    "ssl.SSLEOFError": FailureKind.UNREACHABLE,
    "ssl.SSLError": FailureKind.TLS,
    "builtins.TimeoutError": FailureKind.TIMEOUT,
    "builtins.FileNotFoundError": FailureKind.MISSING,
    "builtins.PermissionError": FailureKind.DENIED,
    "builtins.OSError": FailureKind.UNREACHABLE,
    "builtins.EOFError": FailureKind.BROKEN_ANSWER,
}


def kind_of(error_type: type[BaseException], table: Mapping[str, FailureKind]) -> FailureKind | None:
    """What an exception type means where an instance says nothing better; None where that is not known.

    `table` has classes as `package.Class`, the package being the outermost one; the most derived class counts.
    """
    for cls in error_type.__mro__:
        name = f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"
        kind = table.get(name) or _STANDARD.get(name)
        if kind is not None:
            return kind
    return None


def kind_of_status(status: int) -> FailureKind:
    """What an HTTP status means that is not the one asked for."""
    if status in (401, 403, 407):
        return FailureKind.DENIED
    if status in (404, 410):
        return FailureKind.MISSING
    if status in (412, 416):
        return FailureKind.CHANGED
    if status in (429, 503):
        return FailureKind.BUSY
    if status in (408, 504):
        return FailureKind.TIMEOUT
    if status in (409, 425) or (status >= 500 and status != 501):
        return FailureKind.SERVER
    if status < 300:  # a success that is not the one asked for: the whole object in place of a range
        return FailureKind.BROKEN_ANSWER
    return FailureKind.REFUSED


def retry_after(value: str | None) -> float | None:
    """A `Retry-After` header's seconds; its rarer form, a date, counts as none."""
    return float(value) if value is not None and value.isascii() and value.isdigit() else None
