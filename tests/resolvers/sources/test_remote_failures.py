"""Every exception of the client libraries has a meaning, and the meaning is the right one."""

from __future__ import annotations

import errno
import http.client
import importlib
import inspect
import socket
import ssl

import aiohttp
import botocore.exceptions as boto
import pytest
import s3fs.errors
from botocore.exceptions import ClientError
from yarl import URL

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, SourceUnavailable
from lora_plugins.resolvers.sources.remote_failures import (
    BrokenAnswer,
    FailureKind,
    HttpStatus,
    ObjectChanged,
    RemoteFailure,
    Transient,
    diagnose,
    kind_of_type,
    map_error,
)
from lora_plugins.resolvers.sources.retries import backoff
from lora_plugins.resolvers.sources.source import VersionChanged

MODULES = (
    "botocore.exceptions",
    "botocore.parsers",
    "aiobotocore.httpsession",
    "aiohttp.client_exceptions",
    "aiohttp.http_exceptions",
    "fsspec.exceptions",
    "s3fs.core",
    "socket",
    "ssl",
)
# Of no request that we make: they say that a program is wrong, or belong to another protocol.
NOT_OURS = {
    *("WSServerHandshakeError", "WSMessageTypeError", "NoInitialResponseError", "UnsupportedOperation"),
    *("ImminentRemovalWarning", "UnsupportedTLSVersionWarning", "CancelledError", "_GiveupOnSendfile"),
}


def _exceptions() -> list[type[Exception]]:
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, Exception) and cls.__module__ != "builtins":
                found[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return [found[name] for name in sorted(found) if found[name].__name__ not in NOT_OURS]


@pytest.mark.parametrize("kind", _exceptions(), ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_every_exception_type_is_mapped(kind: type[Exception]) -> None:
    assert kind_of_type(kind) is not None


def test_an_unknown_exception_is_neither_absence_nor_retried() -> None:
    class Novelty(Exception):
        pass

    assert kind_of_type(Novelty) is None
    mapped = map_error(Novelty("https://user:secret@host/?X-Amz-Signature=1"))
    assert type(mapped) is RemoteFailure
    assert not backoff(mapped)
    assert "secret" not in str(mapped)
    assert "Signature" not in str(mapped)


def client_error(status: int, code: str, operation: str = "GetObject") -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}}},
        operation,
    )


CONNECTION = aiohttp.client_reqrep.ConnectionKey("h", 1, False, True, None, None, None)
REQUEST = aiohttp.RequestInfo(URL("http://h/k?token=secret"), "GET", {}, URL("http://h/k"))

# The status and the code of an answer of S3 to a GetObject.
ANSWERS = {
    FailureKind.MISSING: [(404, "NoSuchKey"), (410, "Gone")],
    FailureKind.NO_BUCKET: [(404, "NoSuchBucket")],
    FailureKind.DENIED: [(403, "AccessDenied"), (403, "403")],
    FailureKind.WRONG_KEY: [(403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch"), (400, "InvalidToken")],
    FailureKind.CLOCK: [(403, "RequestTimeTooSkewed")],
    FailureKind.ARCHIVED: [(403, "InvalidObjectState")],
    FailureKind.ENCRYPTED: [
        (400, f"KMS.{name}") for name in ("DisabledException", "KMSInvalidStateException", "NotFoundException")
    ],
    FailureKind.ACCOUNT: [(403, "AllAccessDisabled"), (403, "UserSuspended")],
    FailureKind.EXPIRED: [(400, "ExpiredToken"), (403, "ExpiredToken")],
    FailureKind.BUSY: [(503, "SlowDown"), (429, "TooManyRequests"), (400, "KMS.ThrottlingException")],
    FailureKind.SERVER: [
        *((500, "InternalError"), (502, "502"), (400, "KMS.KeyUnavailableException")),
        (500, "KMS.KMSInternalException"),
    ],
    FailureKind.TIMEOUT: [(504, "504"), (400, "RequestTimeout")],
    FailureKind.REFUSED: [
        *((501, "NotImplemented"), (400, "InvalidRequest"), (400, "AuthorizationHeaderMalformed")),
        (301, "PermanentRedirect"),
    ],
    FailureKind.CHANGED: [(412, "PreconditionFailed"), (416, "InvalidRange")],
}
CASES = [
    *((client_error(*answer), kind) for kind, answers in ANSWERS.items() for answer in answers),
    (client_error(404, "404", "HeadObject"), FailureKind.MISSING),  # no answer to a HEAD has a body
    (client_error(404, "404", "ListObjectsV2"), FailureKind.BROKEN_ANSWER),  # a proxy's
    (boto.EndpointConnectionError(endpoint_url="http://u:p@h"), FailureKind.UNREACHABLE),
    (boto.ConnectTimeoutError(endpoint_url="http://h"), FailureKind.TIMEOUT),
    (boto.ReadTimeoutError(endpoint_url="http://h"), FailureKind.TIMEOUT),
    (boto.SSLError(endpoint_url="http://h", error="e"), FailureKind.TLS),
    (boto.NoCredentialsError(), FailureKind.NO_CREDENTIALS),
    (boto.ParamValidationError(report="r"), FailureKind.BAD_REQUEST),
    (boto.NoRegionError(), FailureKind.BAD_REQUEST),
    (boto.HTTPClientError(error="e"), FailureKind.UNREACHABLE),
    (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), FailureKind.BROKEN_ANSWER),
    (boto.PaginationError(message="a token twice"), FailureKind.BROKEN_ANSWER),
    (s3fs.errors.translate_boto_error(client_error(404, "NoSuchKey")), FailureKind.MISSING),
    (s3fs.errors.translate_boto_error(client_error(404, "NoSuchBucket")), FailureKind.NO_BUCKET),
    (s3fs.errors.translate_boto_error(client_error(503, "SlowDown")), FailureKind.BUSY),
    (s3fs.errors.translate_boto_error(client_error(400, "ExpiredToken")), FailureKind.EXPIRED),
    (aiohttp.ClientConnectorError(CONNECTION, OSError(111, "refused")), FailureKind.UNREACHABLE),
    (aiohttp.ServerDisconnectedError(), FailureKind.UNREACHABLE),
    (aiohttp.SocketTimeoutError(), FailureKind.TIMEOUT),
    (aiohttp.ClientPayloadError(), FailureKind.BROKEN_ANSWER),
    (aiohttp.ClientResponseError(REQUEST, (), status=404), FailureKind.MISSING),
    (aiohttp.ClientResponseError(REQUEST, (), status=403), FailureKind.DENIED),
    (aiohttp.ClientResponseError(REQUEST, (), status=503), FailureKind.BUSY),
    (FileNotFoundError("k"), FailureKind.MISSING),
    (PermissionError("k"), FailureKind.DENIED),
    (HttpStatus(200), FailureKind.BROKEN_ANSWER),
    (HttpStatus(403, "ExpiredToken"), FailureKind.EXPIRED),
    (BrokenAnswer(), FailureKind.BROKEN_ANSWER),
    (ObjectChanged(), FailureKind.CHANGED),
    (http.client.RemoteDisconnected(), FailureKind.UNREACHABLE),
    (http.client.BadStatusLine("x"), FailureKind.BROKEN_ANSWER),
    (http.client.IncompleteRead(b""), FailureKind.BROKEN_ANSWER),
    (socket.gaierror(-2, "Name or service not known"), FailureKind.UNREACHABLE),
    (ConnectionResetError(), FailureKind.UNREACHABLE),
    (ConnectionRefusedError(), FailureKind.UNREACHABLE),
    (TimeoutError(), FailureKind.TIMEOUT),
    (OSError(errno.EHOSTUNREACH, "no route"), FailureKind.UNREACHABLE),
    (OSError(errno.EINVAL, "invalid"), FailureKind.BAD_REQUEST),
    (ssl.SSLCertVerificationError(), FailureKind.TLS),
    (ssl.SSLEOFError(), FailureKind.UNREACHABLE),
]


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda value: repr(value)[:60])
def test_each_failure_has_its_kind_and_error(error: Exception, kind: FailureKind) -> None:
    assert diagnose(error).kind is kind
    mapped = map_error(error, file="f")
    assert kind.is_retryable is isinstance(mapped, Transient) is bool(backoff(mapped))
    assert isinstance(mapped, AdapterNotFound) is (kind is FailureKind.MISSING)
    assert isinstance(mapped, VersionChanged) is (kind is FailureKind.CHANGED)
    assert mapped.file == "f"
    assert "secret" not in str(mapped)
    assert "u:p" not in str(mapped)


def test_an_http_outage_is_not_taken_for_not_found() -> None:
    outage = FileNotFoundError("http://h/k")
    outage.__cause__ = aiohttp.ClientResponseError(REQUEST, (), status=500)
    assert diagnose(outage).kind is FailureKind.SERVER


def test_retry_after_is_kept_and_bounded() -> None:
    mapped = map_error(HttpStatus(503, "SlowDown", 7.0))
    assert backoff(mapped) == 7.0
    assert backoff(map_error(HttpStatus(503, "SlowDown", 7e9))) == 30.0


def test_disk_errors_are_not_retried() -> None:
    assert backoff(OSError(errno.ENOSPC, "No space left on device")) is False


def test_our_own_errors_pass_through() -> None:
    ours = SourceUnavailable("x")
    assert map_error(ours) is ours
    assert isinstance(map_error(ValueError()), LoRAPluginsError)
