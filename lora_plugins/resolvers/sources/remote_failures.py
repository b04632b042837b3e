"""Failures of remote sources: maps errors of client libraries to this package's errors, in one place.

Called wherever a source calls a client library: in goes any exception, out comes an AdapterNotFound, VersionChanged or
RemoteFailure, whose `FailureKind` says whether a retry may help. `diagnose` knows botocore, aiobotocore, s3fs, aiohttp
and fsspec; the Hub's libraries have `hub_failures.py`. A test fails for an exception type of the libraries without a
kind. Unknown failures are never retried and never taken for "no such adapter".

The texts of errors have the kind of failure, the HTTP status and the object store's error code, never the object
store's message or address, which may carry a signed URL; errors are raised `from None` for the same reason.
"""

from __future__ import annotations

import errno
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, SourceUnavailable
from lora_plugins.resolvers.sources.source import VersionChanged

_MAX_WAIT_S = 30.0  # the longest wait before a retry, whatever the source asks for


class FailureKind(Enum):
    """A kind of failure: the text, the remedy, and whether a retry may help.

    `{source}` in the text stands for the kind of source, such as "an object store".
    """

    MISSING = ("no such object", "upload the adapter again", False)
    NO_BUCKET = ("no such bucket", "create the bucket or correct the URL template", False)
    CHANGED = ("an object that changed meanwhile", "ask again", False)
    HIDDEN = ("a repository that is missing or private", "check its name", False)
    GATED = ("a gated repository", "accept its terms on its page on the Hub", False)
    OFFLINE = ("offline mode", "unset HF_HUB_OFFLINE, or run 'hf download' where there is a network", False)
    DENIED = ("{source} that denies access", "grant the credentials the right to list and read", False)
    EXPIRED = ("credentials that have expired", "renew them: files and profiles are read again", False)
    WRONG_KEY = ("credentials that are not accepted", "correct them: files and profiles are read again", False)
    ACCOUNT = ("{source} that has closed the account", "settle it with the account's provider", False)
    CLOCK = ("a clock that differs from that of {source}", "set this machine's clock, such as by NTP", False)
    ARCHIVED = ("an archived object", "restore the object, or copy it to a storage class that is read at once", False)
    ENCRYPTED = ("an encrypted object whose key is not to be had", "enable its key, and grant kms:Decrypt", False)
    NO_CREDENTIALS = ("no usable credentials", "provide credentials to the server, or set anonymous access", False)
    BAD_REQUEST = ("a request that cannot be made", "check endpoint, region and client configuration", False)
    REFUSED = ("{source} that refuses the request", "check endpoint, region and bucket", False)
    TLS = ("a TLS connection that cannot be trusted", "name its CA's file in SSL_CERT_FILE (S3: AWS_CA_BUNDLE)", False)
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
    """A remote source did not answer as asked; an immediate retry may help only where the failure is `Transient`."""

    kind = FailureKind.UNKNOWN


class Transient(RemoteFailure):
    """A failure that may pass; `wait_s`: seconds that the source asks clients to wait, None where it does not ask."""

    wait_s: float | None = None


class BrokenAnswer(Exception):
    """A body, header or file other than requested: short, long, of another range, or damaged."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure; `detail` is the HTTP status or exception type that shows the kind, for the error's text.

    `retry_after_s` is None where the source does not say when to ask again.
    """

    kind: FailureKind
    detail: str = ""
    retry_after_s: float | None = None

    def as_error(
        self, source: str, *, found: str = "", expected: str = "the adapter's files", remedy: str = "", file: str = ""
    ) -> LoRAPluginsError:
        """The error of this package: AdapterNotFound, VersionChanged, or RemoteFailure (Transient if a retry may help).

        `found` and `remedy` replace the texts of the kind.
        """
        kind = self.kind
        text = found or kind.found.format(source=source)
        text = f"{text} ({self.detail})" if self.detail else text
        answers = {FailureKind.MISSING: AdapterNotFound, FailureKind.CHANGED: VersionChanged}
        error_type = answers.get(kind) or (Transient if kind.is_retryable else RemoteFailure)
        error = error_type(text, expected=expected, remedy=remedy or kind.remedy, file=file)
        if isinstance(error, RemoteFailure):
            error.kind = kind
        if isinstance(error, Transient) and self.retry_after_s:
            error.wait_s = min(self.retry_after_s, _MAX_WAIT_S)
        return error


def table_of(kinds: Mapping[FailureKind, str]) -> Mapping[str, FailureKind]:
    """Turn texts with the names of each kind, separated by blanks, into a table from name to kind.

    Names are of exception classes (text, so that no library is imported to recognise a class), statuses or error codes.
    """
    return {name: kind for kind, names in kinds.items() for name in names.split()}


_STANDARD = table_of(
    {
        FailureKind.BROKEN_ANSWER: "lora_plugins.BrokenAnswer builtins.EOFError",
        FailureKind.TLS: "ssl.SSLCertVerificationError ssl.SSLError",
        FailureKind.UNREACHABLE: "ssl.SSLZeroReturnError ssl.SSLEOFError builtins.OSError",
        FailureKind.TIMEOUT: "builtins.TimeoutError",
        FailureKind.MISSING: "builtins.FileNotFoundError",
        FailureKind.DENIED: "builtins.PermissionError",
    }
)


def kind_of(error_type: type[BaseException], table: Mapping[str, FailureKind]) -> FailureKind | None:
    """The kind of an exception type, for instances without an HTTP status or error code; None where unknown.

    `table` has classes as `package.Class` with the outermost package; the most derived class counts.
    """
    # `__mro__` is in the order of inheritance, the most derived class first.
    for cls in error_type.__mro__:
        name = f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"
        kind = table.get(name) or _STANDARD.get(name)
        if kind is not None:
            return kind
    return None


def untrusted(error: BaseException | None) -> BaseException | None:
    """Find the error of a connection that is not trusted, among a client's error and its causes; None without one.

    Either TLS refuses the certificate, or the file of trusted certificates is missing.
    """
    # Other errors of OpenSSL, such as for a damaged record, may pass. For a missing file of certificates, Python raises
    # FileNotFoundError without a file name, unlike for any other missing file.
    is_certificate = isinstance(error, ssl.SSLError) and re.search(r"CERTIFICATE|VERSION|UNKNOWN_CA", str(error))
    is_bundle = isinstance(error, FileNotFoundError) and error.errno is not None and error.filename is None
    if error is None or is_certificate or is_bundle:
        return error
    return untrusted(error.__cause__ or error.__context__)


_BY_STATUS = table_of(
    {
        FailureKind.DENIED: "401 403 407",
        FailureKind.MISSING: "404 410",
        FailureKind.CHANGED: "412 416",
        FailureKind.BUSY: "429 503",
        FailureKind.TIMEOUT: "408 504",
        FailureKind.SERVER: "409 425",
        FailureKind.REFUSED: "501",
    }
)


def kind_of_status(status: int) -> FailureKind:
    """The kind of an unexpected HTTP status.

    An unexpected success is a broken answer: such as the whole object (200) in the place of a range (206).
    """
    others = FailureKind.BROKEN_ANSWER if status < 300 else FailureKind.REFUSED if status < 500 else FailureKind.SERVER
    return _BY_STATUS.get(str(status), others)


def retry_after(value: str | None) -> float | None:
    """A `Retry-After` header's seconds; its rarer form, a date, counts as none."""
    return float(value) if value is not None and value.isascii() and value.isdigit() else None


class HttpStatus(Exception):
    """An unexpected HTTP answer; `error_code` is a store's own code for the error, or more text for people."""

    def __init__(self, status: int, error_code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status} {error_code}".strip())
        self.status = status
        self.error_code = error_code
        self.retry_after_s = retry_after_s


class ObjectChanged(Exception):
    """An answer with another version of the object than the located one."""


# Kinds of S3's own error codes, where the status shows less. Codes of S3's key service lack their prefix `KMS.` here.
_BY_CODE = table_of(
    {
        FailureKind.EXPIRED: "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired",
        FailureKind.NO_BUCKET: "NoSuchBucket",
        FailureKind.BUSY: "SlowDown Throttling ThrottlingException RequestLimitExceeded TooManyRequests",
        FailureKind.WRONG_KEY: "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidSecurity",
        FailureKind.ACCOUNT: "AccountProblem AllAccessDisabled NotSignedUp InvalidPayer UserSuspended",
        FailureKind.CLOCK: "RequestTimeTooSkewed",
        FailureKind.ARCHIVED: "InvalidObjectState ObjectNotInActiveTierError",
        FailureKind.SERVER: "KMSInternalException DependencyTimeoutException KeyUnavailableException",
        FailureKind.MISSING: "NoSuchKey NoSuchVersion NotFound",
        FailureKind.TIMEOUT: "RequestTimeout",
    }
)
_TABLE = table_of(
    {
        FailureKind.CHANGED: "lora_plugins.ObjectChanged",
        FailureKind.UNREACHABLE: """
            botocore.ConnectionError botocore.HTTPClientError
            aiohttp.ClientConnectionError
            """,
        FailureKind.TIMEOUT: """
            botocore.ConnectTimeoutError botocore.ReadTimeoutError
            aiohttp.ServerTimeoutError fsspec.FSTimeoutError
            """,
        FailureKind.TLS: "botocore.SSLError aiohttp.ClientSSLError aiohttp.ServerFingerprintMismatch",
        FailureKind.BROKEN_ANSWER: """
            botocore.IncompleteReadError botocore.ResponseStreamingError botocore.ChecksumError
            botocore.FlexibleChecksumError botocore.EventStreamError botocore.ResponseParserError
            aiohttp.ClientError aiohttp.HttpProcessingError http.HTTPException xml.ParseError botocore.PaginationError
            """,
        FailureKind.NO_CREDENTIALS: """
            botocore.NoCredentialsError botocore.NoAuthTokenError botocore.PartialCredentialsError
            botocore.CredentialRetrievalError botocore.TokenRetrievalError botocore.SSOTokenLoadError
            botocore.MetadataRetrievalError google.GoogleAuthError
            """,
        FailureKind.EXPIRED: "botocore.UnauthorizedSSOTokenError botocore.RefreshWithMFAUnsupportedError",
        FailureKind.BAD_REQUEST: """
            botocore.BotoCoreError botocore.MissingServiceIdError botocore.UndefinedModelAttributeError
            urllib3.LocationParseError aiohttp.InvalidURL fsspec.BlocksizeMismatchError
            """,
        # For instances that carry no answer with a status.
        FailureKind.REFUSED: """
            lora_plugins.HttpStatus botocore.ClientError aiohttp.ClientResponseError gcsfs.HttpError azure.AzureError
            """,
    }
)
# The system refuses the call itself, so the same call fails again.
_PERMANENT_OS_ERRORS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG})


def kind_of_type(error_type: type[BaseException]) -> FailureKind | None:
    """The kind of an exception type of an object store's libraries, as `kind_of`; None where unknown."""
    return kind_of(error_type, _TABLE)


def diagnose(error: BaseException) -> Failure:
    """Find the kind of a failure; an unknown failure is not retried, and never "no such object"."""
    cause = error.__cause__
    # s3fs translates botocore's errors, and fsspec's HTTP raises FileNotFoundError for any failure: the cause knows
    # more, unless the cause is such a FileNotFoundError itself.
    if cause is not None and isinstance(error, OSError) and not isinstance(cause, FileNotFoundError):
        found = diagnose(cause)
        if found.kind is not FailureKind.UNKNOWN:
            return found
    answer = _answer_of(error)
    if answer is not None:
        status, code, retry_after_s = answer
        detail = f"HTTP {status} {code}" if code and code != str(status) else f"HTTP {status}"
        others = FailureKind.ENCRYPTED if code.startswith("KMS.") else kind_of_status(status)
        kind = _BY_CODE.get(code.removeprefix("KMS."), others)
        # A 404 without S3's own error code is a proxy's, and must not turn into "no such adapter".
        if kind is FailureKind.MISSING and _must_have_code(error) and code in ("", str(status)):
            kind = FailureKind.BROKEN_ANSWER
        return Failure(kind, detail, retry_after_s)
    kind = kind_of_type(type(error)) or FailureKind.UNKNOWN
    if kind is FailureKind.UNREACHABLE and untrusted(error):
        kind = FailureKind.TLS
    if isinstance(error, OSError) and kind is FailureKind.UNREACHABLE and error.errno in _PERMANENT_OS_ERRORS:
        kind = FailureKind.BAD_REQUEST
    return Failure(kind, type(error).__name__)


def map_error(error: BaseException, *, file: str = "") -> LoRAPluginsError:
    """This package's error for an error of an object store's libraries; an error of this package stays as it is."""
    if isinstance(error, LoRAPluginsError):
        return error
    return diagnose(error).as_error("an object store", file=file)


def _must_have_code(error: BaseException) -> bool:
    """Whether S3 itself would state an error code: in answers with a body, so in all but answers to HEAD."""
    operation = getattr(error, "operation_name", "")  # of botocore's ClientError: "HeadObject" for HEAD
    return bool(operation) and not operation.startswith("Head")


def _answer_of(error: BaseException) -> tuple[int, str, float | None] | None:
    """The HTTP status, S3's error code (or empty) and Retry-After in seconds of an answer; None without an answer."""
    if isinstance(error, HttpStatus):
        return error.status, error.error_code, error.retry_after_s
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's ClientError
        meta = response.get("ResponseMetadata", {})
        code = str(response.get("Error", {}).get("Code", ""))
        # botocore puts the status in the place of the code where the answer has no body; 400 where neither is known.
        status = meta.get("HTTPStatusCode") or (int(code) if code.isascii() and code.isdigit() else 400)
        return int(status), code, retry_after(meta.get("HTTPHeaders", {}).get("retry-after"))
    for attribute in ("status", "status_code", "code"):  # aiohttp; azure; gcsfs
        status = getattr(error, attribute, None)
        if isinstance(status, int) and 300 <= status < 600:
            headers: Any = getattr(error, "headers", None) or {}
            return status, "", retry_after(headers.get("Retry-After"))
    return None
