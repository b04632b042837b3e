"""What object stores and their client libraries raise, mapped once to this package's errors.

A test fails on an exception type of botocore, aiobotocore, s3fs, aiohttp, fsspec or the standard library's HTTP that
has no kind. Our texts name the kind of failure, the HTTP status and the store's error code, never its message or
address, and are raised `from None`: those may carry a signed URL.
"""

from __future__ import annotations

import errno
from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.resolvers.sources.failures import Failure, FailureKind, kind_of, kind_of_status, retry_after


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
