"""Why a remote source has no answer: what its client library raises, mapped once to this package's errors.

`diagnose` knows botocore, aiobotocore, s3fs, aiohttp, fsspec and the standard library's HTTP; the Hub's libraries have
`hub_errors.py`. A test fails on an exception type of theirs that has no kind. Unknown failures are never retried and
never taken for "no such adapter".

Our texts name the kind of failure, the HTTP status and the store's error code, never its message or address, and are
raised `from None`: those may carry a signed URL.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

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


class HttpStatus(Exception):
    """An HTTP answer that is not the one asked for; `error_code` is what S3's XML says, where there is some."""

    def __init__(self, status: int, error_code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status} {error_code}".strip())
        self.status = status
        self.error_code = error_code
        self.retry_after_s = retry_after_s


class ObjectChanged(Exception):
    """An answer that belongs to another version of the object."""


# What S3's own error codes mean, where the status says less.
_BY_CODE = {
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"), FailureKind.EXPIRED
    ),
    "NoSuchBucket": FailureKind.NO_BUCKET,
    **dict.fromkeys(
        ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"), FailureKind.BUSY
    ),
    **dict.fromkeys(
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "RequestTimeTooSkewed"), FailureKind.DENIED
    ),
    **dict.fromkeys(("NoSuchKey", "NoSuchVersion", "NotFound"), FailureKind.MISSING),
    "RequestTimeout": FailureKind.TIMEOUT,
}
_TABLE = {
    "lora_plugins.HttpStatus": FailureKind.REFUSED,
    "lora_plugins.ObjectChanged": FailureKind.CHANGED,
    "botocore.EndpointConnectionError": FailureKind.UNREACHABLE,
    "botocore.ConnectTimeoutError": FailureKind.TIMEOUT,
    "botocore.ReadTimeoutError": FailureKind.TIMEOUT,
    "botocore.ConnectionClosedError": FailureKind.UNREACHABLE,
    "botocore.ConnectionError": FailureKind.UNREACHABLE,
    "botocore.ProxyConnectionError": FailureKind.UNREACHABLE,
    "botocore.SSLError": FailureKind.TLS,
    "botocore.HTTPClientError": FailureKind.UNREACHABLE,
    "botocore.IncompleteReadError": FailureKind.BROKEN_ANSWER,
    "botocore.ResponseStreamingError": FailureKind.BROKEN_ANSWER,
    "botocore.ChecksumError": FailureKind.BROKEN_ANSWER,
    "botocore.FlexibleChecksumError": FailureKind.BROKEN_ANSWER,
    "botocore.EventStreamError": FailureKind.BROKEN_ANSWER,
    "botocore.ResponseParserError": FailureKind.BROKEN_ANSWER,
    "botocore.NoCredentialsError": FailureKind.NO_CREDENTIALS,
    "botocore.NoAuthTokenError": FailureKind.NO_CREDENTIALS,
    "botocore.PartialCredentialsError": FailureKind.NO_CREDENTIALS,
    "botocore.CredentialRetrievalError": FailureKind.NO_CREDENTIALS,
    "botocore.TokenRetrievalError": FailureKind.NO_CREDENTIALS,
    "botocore.UnauthorizedSSOTokenError": FailureKind.EXPIRED,
    "botocore.SSOTokenLoadError": FailureKind.NO_CREDENTIALS,
    "botocore.RefreshWithMFAUnsupportedError": FailureKind.EXPIRED,
    "botocore.MetadataRetrievalError": FailureKind.NO_CREDENTIALS,
    "botocore.ClientError": FailureKind.REFUSED,  # where its answer says nothing better
    "botocore.BotoCoreError": FailureKind.BAD_REQUEST,
    "botocore.MissingServiceIdError": FailureKind.BAD_REQUEST,
    "botocore.UndefinedModelAttributeError": FailureKind.BAD_REQUEST,
    "urllib3.LocationParseError": FailureKind.BAD_REQUEST,
    "xml.ParseError": FailureKind.BROKEN_ANSWER,
    "aiohttp.ClientPayloadError": FailureKind.BROKEN_ANSWER,
    "aiohttp.ServerTimeoutError": FailureKind.TIMEOUT,
    "aiohttp.ServerConnectionError": FailureKind.UNREACHABLE,
    "aiohttp.ClientSSLError": FailureKind.TLS,
    "aiohttp.ClientConnectorCertificateError": FailureKind.TLS,
    "aiohttp.ServerFingerprintMismatch": FailureKind.TLS,
    "aiohttp.ClientOSError": FailureKind.UNREACHABLE,
    "aiohttp.ClientConnectionError": FailureKind.UNREACHABLE,
    "aiohttp.InvalidURL": FailureKind.BAD_REQUEST,
    "aiohttp.ClientResponseError": FailureKind.REFUSED,
    "aiohttp.ClientError": FailureKind.BROKEN_ANSWER,
    "aiohttp.HttpProcessingError": FailureKind.BROKEN_ANSWER,
    "fsspec.FSTimeoutError": FailureKind.TIMEOUT,
    "fsspec.BlocksizeMismatchError": FailureKind.BAD_REQUEST,
    "gcsfs.HttpError": FailureKind.REFUSED,
    "azure.AzureError": FailureKind.REFUSED,
    "google.GoogleAuthError": FailureKind.NO_CREDENTIALS,
}
_PERMANENT_OS_ERRORS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG})


def kind_of_type(error_type: type[BaseException]) -> FailureKind | None:
    """What an exception type means where an instance of it says nothing better; None where that is not known."""
    return kind_of(error_type, _TABLE)


def diagnose(error: BaseException) -> Failure:
    """Say what is wrong; anything unknown is not worth a retry, and never "no such object"."""
    cause = error.__cause__
    # s3fs translates botocore's errors, and fsspec's HTTP says FileNotFoundError of any: the cause knows better.
    if cause is not None and isinstance(error, OSError) and not isinstance(cause, FileNotFoundError):
        found = diagnose(cause)
        if found.kind is not FailureKind.UNKNOWN:
            return found
    name = type(error).__name__
    answer = _answer_of(error)
    if answer is not None:
        status, code, retry_after_s = answer
        detail = f"HTTP {status} {code}" if code and code != str(status) else f"HTTP {status}"
        return Failure(_BY_CODE.get(code) or kind_of_status(status), detail, retry_after_s)
    kind = kind_of_type(type(error)) or FailureKind.UNKNOWN
    if isinstance(error, OSError) and kind is FailureKind.UNREACHABLE and error.errno in _PERMANENT_OS_ERRORS:
        kind = FailureKind.BAD_REQUEST
    return Failure(kind, name)


def map_error(error: BaseException, *, file: str = "") -> LoRAPluginsError:
    """Our error for any of theirs: AdapterNotFound, VersionChanged or a RemoteFailure."""
    if isinstance(error, LoRAPluginsError):
        return error
    return diagnose(error).as_error("an object store", file=file)


def _answer_of(error: BaseException) -> tuple[int, str, float | None] | None:
    """The HTTP status, S3's error code and Retry-After of an error that carries an answer."""
    if isinstance(error, HttpStatus):
        return error.status, error.error_code, error.retry_after_s
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's ClientError
        meta = response.get("ResponseMetadata", {})
        code = str(response.get("Error", {}).get("Code", ""))
        status = meta.get("HTTPStatusCode") or (int(code) if code.isascii() and code.isdigit() else 400)
        return int(status), code, retry_after(meta.get("HTTPHeaders", {}).get("retry-after"))
    for attribute in ("status", "status_code", "code"):  # aiohttp; azure; gcsfs
        status = getattr(error, attribute, None)
        if isinstance(status, int) and 300 <= status < 600:
            headers: Any = getattr(error, "headers", None) or {}
            return status, "", retry_after(headers.get("Retry-After"))
    return None
