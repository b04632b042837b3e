"""What object stores and their client libraries raise, mapped once to this package's errors.

Every failure of botocore, aiobotocore, s3fs, aiohttp, fsspec and the standard library's HTTP has one `Trouble`; a test
fails on an exception type of theirs that has none. Our texts name the kind of failure, the HTTP status and the store's
error code, never its message or address, and are raised `from None`: those may carry a signed URL.
"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, SourceUnavailable
from lora_plugins.resolvers.sources.source import VersionChanged


class Trouble(Enum):
    """A kind of failure: what was found, what to do, and whether asking again may help."""

    MISSING = ("no such object", "upload the adapter again", False)
    NO_BUCKET = ("no such bucket", "create the bucket or correct the URL template", False)
    CHANGED = ("an object that changed meanwhile", "ask again", False)
    DENIED = ("an object store that denies access", "grant the credentials the right to list and read", False)
    EXPIRED = ("credentials that have expired", "renew the credentials", False)
    NO_CREDENTIALS = ("no usable credentials", "provide credentials to the server, or set anonymous access", False)
    CLIENT = ("a request that cannot be made", "check endpoint, region and client configuration", False)
    REFUSED = ("an object store that refuses the request", "check endpoint, region and bucket", False)
    TLS = ("a TLS connection that cannot be trusted", "check the endpoint's certificate and the CA bundle", False)
    BUSY = ("an object store that asks to slow down", "ask again later", True)
    SERVER = ("an object store that fails", "ask again later; look at the store's health", True)
    TIMEOUT = ("an object store that does not answer in time", "check the network and the endpoint", True)
    UNREACHABLE = ("an object store that cannot be reached", "check the network and the endpoint", True)
    BROKEN_ANSWER = ("an answer that broke off or is malformed", "check proxies between server and store", True)
    UNKNOWN = ("an unexpected failure of the object store's client", "look at the server's log", False)

    def __init__(self, found: str, remedy: str, retryable: bool) -> None:
        self.found = found
        self.remedy = remedy
        self.retryable = retryable


class HttpStatus(Exception):
    """An HTTP answer that is not the one asked for; `error_code` is what S3's XML says, where there is some."""

    def __init__(self, status: int, error_code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status} {error_code}".strip())
        self.status = status
        self.error_code = error_code
        self.retry_after_s = retry_after_s


class BrokenAnswer(Exception):
    """A body or header that is not what the request asked for: short, long, or of another range."""


class ObjectChanged(Exception):
    """An answer that belongs to another version of the object."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong, with the HTTP status or exception type that says so."""

    trouble: Trouble
    detail: str = ""
    retry_after_s: float | None = None


class Transient(SourceUnavailable):
    """A failure that may pass by itself; `wait_s` is how long the store asks us to wait, where it does."""

    wait_s: float | None = None


_MAX_WAIT_S = 30.0
_ABSENT_CODES = frozenset({"NoSuchKey", "NoSuchVersion", "404", "NotFound"})
_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_DENIED_CODES = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "RequestTimeTooSkewed"})
_BUSY_CODES = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"})

# By qualified name, so that no library is imported to recognise an error of it; the first of an error's classes counts.
_BY_TYPE = {
    "botocore.exceptions.EndpointConnectionError": Trouble.UNREACHABLE,
    "botocore.exceptions.ConnectTimeoutError": Trouble.TIMEOUT,
    "botocore.exceptions.ReadTimeoutError": Trouble.TIMEOUT,
    "botocore.exceptions.ConnectionClosedError": Trouble.UNREACHABLE,
    "botocore.exceptions.ConnectionError": Trouble.UNREACHABLE,
    "botocore.exceptions.ProxyConnectionError": Trouble.UNREACHABLE,
    "botocore.exceptions.SSLError": Trouble.TLS,
    "botocore.exceptions.HTTPClientError": Trouble.UNREACHABLE,
    "botocore.exceptions.IncompleteReadError": Trouble.BROKEN_ANSWER,
    "botocore.exceptions.ResponseStreamingError": Trouble.BROKEN_ANSWER,
    "botocore.exceptions.ChecksumError": Trouble.BROKEN_ANSWER,
    "botocore.exceptions.FlexibleChecksumError": Trouble.BROKEN_ANSWER,
    "botocore.exceptions.EventStreamError": Trouble.BROKEN_ANSWER,
    "botocore.parsers.ResponseParserError": Trouble.BROKEN_ANSWER,
    "botocore.exceptions.NoCredentialsError": Trouble.NO_CREDENTIALS,
    "botocore.exceptions.NoAuthTokenError": Trouble.NO_CREDENTIALS,
    "botocore.exceptions.PartialCredentialsError": Trouble.NO_CREDENTIALS,
    "botocore.exceptions.CredentialRetrievalError": Trouble.NO_CREDENTIALS,
    "botocore.exceptions.TokenRetrievalError": Trouble.NO_CREDENTIALS,
    "botocore.exceptions.UnauthorizedSSOTokenError": Trouble.EXPIRED,
    "botocore.exceptions.SSOTokenLoadError": Trouble.NO_CREDENTIALS,
    "botocore.exceptions.RefreshWithMFAUnsupportedError": Trouble.EXPIRED,
    "botocore.exceptions.MetadataRetrievalError": Trouble.NO_CREDENTIALS,
    "botocore.exceptions.ClientError": Trouble.REFUSED,  # where its answer says nothing better
    "botocore.exceptions.BotoCoreError": Trouble.CLIENT,
    "botocore.exceptions.MissingServiceIdError": Trouble.CLIENT,
    "botocore.exceptions.UndefinedModelAttributeError": Trouble.CLIENT,
    "urllib3.exceptions.LocationParseError": Trouble.CLIENT,
    "xml.etree.ElementTree.ParseError": Trouble.BROKEN_ANSWER,
    "aiohttp.client_exceptions.ClientPayloadError": Trouble.BROKEN_ANSWER,
    "aiohttp.client_exceptions.ServerTimeoutError": Trouble.TIMEOUT,
    "aiohttp.client_exceptions.ServerConnectionError": Trouble.UNREACHABLE,
    "aiohttp.client_exceptions.ClientSSLError": Trouble.TLS,
    "aiohttp.client_exceptions.ClientConnectorCertificateError": Trouble.TLS,
    "aiohttp.client_exceptions.ServerFingerprintMismatch": Trouble.TLS,
    "aiohttp.client_exceptions.ClientOSError": Trouble.UNREACHABLE,
    "aiohttp.client_exceptions.ClientConnectionError": Trouble.UNREACHABLE,
    "aiohttp.client_exceptions.InvalidURL": Trouble.CLIENT,
    "aiohttp.client_exceptions.ClientResponseError": Trouble.REFUSED,
    "aiohttp.client_exceptions.ClientError": Trouble.BROKEN_ANSWER,
    "aiohttp.http_exceptions.HttpProcessingError": Trouble.BROKEN_ANSWER,
    "fsspec.exceptions.FSTimeoutError": Trouble.TIMEOUT,
    "fsspec.exceptions.BlocksizeMismatchError": Trouble.CLIENT,
    "gcsfs.retry.HttpError": Trouble.REFUSED,
    "azure.core.exceptions.AzureError": Trouble.REFUSED,
    "google.auth.exceptions.GoogleAuthError": Trouble.NO_CREDENTIALS,
}
_BY_CLASS: tuple[tuple[type[BaseException], Trouble], ...] = (
    (BrokenAnswer, Trouble.BROKEN_ANSWER),
    (ObjectChanged, Trouble.CHANGED),
    (HttpStatus, Trouble.REFUSED),
    (http.client.RemoteDisconnected, Trouble.UNREACHABLE),
    (http.client.InvalidURL, Trouble.CLIENT),
    (http.client.HTTPException, Trouble.BROKEN_ANSWER),
    (socket.gaierror, Trouble.UNREACHABLE),
    (ssl.SSLCertVerificationError, Trouble.TLS),
    (ssl.SSLZeroReturnError, Trouble.UNREACHABLE),
    (ssl.SSLEOFError, Trouble.UNREACHABLE),
    (ssl.SSLError, Trouble.TLS),
    (TimeoutError, Trouble.TIMEOUT),
    (ConnectionError, Trouble.UNREACHABLE),
    (FileNotFoundError, Trouble.MISSING),
    (PermissionError, Trouble.DENIED),
    (OSError, Trouble.UNREACHABLE),
    (EOFError, Trouble.BROKEN_ANSWER),
)
_PERMANENT_OS_ERRORS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG})


def trouble_of(kind: type[BaseException]) -> Trouble | None:
    """What an exception type means where an instance of it says nothing better; None where that is not known."""
    for cls in kind.__mro__:
        trouble = _BY_TYPE.get(f"{cls.__module__}.{cls.__qualname__}")
        if trouble is not None:
            return trouble
    return next((trouble for cls, trouble in _BY_CLASS if issubclass(kind, cls)), None)


def diagnose(error: BaseException) -> Diagnosis:
    """Say what is wrong; anything unknown is not worth a retry, and never "no such object"."""
    cause = error.__cause__
    # s3fs translates botocore's errors, and fsspec's HTTP says FileNotFoundError of any: the cause knows better.
    if cause is not None and isinstance(error, OSError) and not isinstance(cause, FileNotFoundError):
        found = diagnose(cause)
        if found.trouble is not Trouble.UNKNOWN:
            return found
    name = type(error).__name__
    answer = _answer_of(error)
    if answer is not None:
        status, code, retry_after_s = answer
        detail = f"HTTP {status} {code}" if code and code != str(status) else f"HTTP {status}"
        return Diagnosis(_by_answer(status, code), detail, retry_after_s)
    trouble = trouble_of(type(error)) or Trouble.UNKNOWN
    if isinstance(error, OSError) and trouble is Trouble.UNREACHABLE and error.errno in _PERMANENT_OS_ERRORS:
        trouble = Trouble.CLIENT
    return Diagnosis(trouble, name)


def backoff(error: Exception) -> bool | float:
    """For `stamina`: whether to try again, or after how many seconds where the store says so.

    Only of mapped errors: an OSError that is left is the disk's.
    """
    if isinstance(error, Transient) and error.wait_s is not None:
        return error.wait_s
    return isinstance(error, Transient)


def map_error(error: BaseException, *, file: str = "") -> LoRAPluginsError:
    """Our error for any of theirs: AdapterNotFound, VersionChanged, or SourceUnavailable (`Transient`: retryable)."""
    if isinstance(error, LoRAPluginsError):
        return error
    found = diagnose(error)
    trouble = found.trouble
    kind: type[LoRAPluginsError] = Transient if trouble.retryable else SourceUnavailable
    if trouble is Trouble.MISSING:
        kind = AdapterNotFound
    elif trouble is Trouble.CHANGED:
        kind = VersionChanged
    text = f"{trouble.found} ({found.detail})" if found.detail else trouble.found
    mapped = kind(text, expected="the adapter's files", remedy=trouble.remedy, file=file)
    if isinstance(mapped, Transient) and found.retry_after_s is not None:
        mapped.wait_s = min(found.retry_after_s, _MAX_WAIT_S)
    return mapped


def retry_after(value: str | None) -> float | None:
    """A `Retry-After` header's seconds; its rarer form, a date, counts as none."""
    return float(value) if value is not None and value.isascii() and value.isdigit() else None


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


def _by_answer(status: int, code: str) -> Trouble:
    if code in _EXPIRED_CODES:
        return Trouble.EXPIRED
    if code == "NoSuchBucket":
        return Trouble.NO_BUCKET
    if code in _BUSY_CODES or status in (429, 503):
        return Trouble.BUSY
    if status in (401, 403, 407) or code in _DENIED_CODES:
        return Trouble.DENIED
    if status in (404, 410) or code in _ABSENT_CODES:
        return Trouble.MISSING
    if status in (412, 416):
        return Trouble.CHANGED
    if status in (408, 504) or code == "RequestTimeout":
        return Trouble.TIMEOUT
    if status in (409, 425) or (status >= 500 and status != 501):
        return Trouble.SERVER
    if status < 300:  # a success that is not the one asked for: the whole object in place of a range
        return Trouble.BROKEN_ANSWER
    return Trouble.REFUSED
