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
from lora_plugins.resolvers.sources.object_store.errors import (
    BrokenAnswer,
    HttpStatus,
    ObjectChanged,
    Transient,
    Trouble,
    backoff,
    diagnose,
    map_error,
    trouble_of,
)
from lora_plugins.resolvers.sources.source import VersionChanged

MODULES = (
    "botocore.exceptions",
    "botocore.parsers",
    "aiobotocore.httpsession",
    "aiohttp.client_exceptions",
    "aiohttp.http_exceptions",
    "fsspec.exceptions",
    "s3fs.core",
    "http.client",
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
    assert trouble_of(kind) is not None


def test_an_unknown_exception_is_neither_absence_nor_retried() -> None:
    class Novelty(Exception):
        pass

    assert trouble_of(Novelty) is None
    mapped = map_error(Novelty("https://user:secret@host/?X-Amz-Signature=1"))
    assert type(mapped) is SourceUnavailable
    assert not backoff(mapped)
    assert "secret" not in str(mapped)
    assert "Signature" not in str(mapped)


def client_error(status: int, code: str) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}}},
        "op",
    )


CONNECTION = aiohttp.client_reqrep.ConnectionKey("h", 1, False, True, None, None, None)
REQUEST = aiohttp.RequestInfo(URL("http://h/k?token=secret"), "GET", {}, URL("http://h/k"))

CASES = [
    (client_error(404, "NoSuchKey"), Trouble.MISSING),
    (client_error(404, "404"), Trouble.MISSING),
    (client_error(404, "NoSuchBucket"), Trouble.NO_BUCKET),
    (client_error(403, "AccessDenied"), Trouble.DENIED),
    (client_error(403, "403"), Trouble.DENIED),
    (client_error(403, "InvalidAccessKeyId"), Trouble.DENIED),
    (client_error(400, "ExpiredToken"), Trouble.EXPIRED),
    (client_error(403, "ExpiredToken"), Trouble.EXPIRED),
    (client_error(400, "InvalidToken"), Trouble.DENIED),
    (client_error(503, "SlowDown"), Trouble.BUSY),
    (client_error(429, "TooManyRequests"), Trouble.BUSY),
    (client_error(500, "InternalError"), Trouble.SERVER),
    (client_error(502, "502"), Trouble.SERVER),
    (client_error(504, "504"), Trouble.TIMEOUT),
    (client_error(400, "RequestTimeout"), Trouble.TIMEOUT),
    (client_error(501, "NotImplemented"), Trouble.REFUSED),
    (client_error(400, "InvalidRequest"), Trouble.REFUSED),
    (client_error(301, "PermanentRedirect"), Trouble.REFUSED),
    (client_error(412, "PreconditionFailed"), Trouble.CHANGED),
    (client_error(416, "InvalidRange"), Trouble.CHANGED),
    (boto.EndpointConnectionError(endpoint_url="http://u:p@h"), Trouble.UNREACHABLE),
    (boto.ConnectTimeoutError(endpoint_url="http://h"), Trouble.TIMEOUT),
    (boto.ReadTimeoutError(endpoint_url="http://h"), Trouble.TIMEOUT),
    (boto.SSLError(endpoint_url="http://h", error="e"), Trouble.TLS),
    (boto.NoCredentialsError(), Trouble.NO_CREDENTIALS),
    (boto.ParamValidationError(report="r"), Trouble.CLIENT),
    (boto.NoRegionError(), Trouble.CLIENT),
    (boto.HTTPClientError(error="e"), Trouble.UNREACHABLE),
    (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), Trouble.BROKEN_ANSWER),
    (s3fs.errors.translate_boto_error(client_error(404, "NoSuchKey")), Trouble.MISSING),
    (s3fs.errors.translate_boto_error(client_error(404, "NoSuchBucket")), Trouble.NO_BUCKET),
    (s3fs.errors.translate_boto_error(client_error(503, "SlowDown")), Trouble.BUSY),
    (s3fs.errors.translate_boto_error(client_error(400, "ExpiredToken")), Trouble.EXPIRED),
    (aiohttp.ClientConnectorError(CONNECTION, OSError(111, "refused")), Trouble.UNREACHABLE),
    (aiohttp.ServerDisconnectedError(), Trouble.UNREACHABLE),
    (aiohttp.SocketTimeoutError(), Trouble.TIMEOUT),
    (aiohttp.ClientPayloadError(), Trouble.BROKEN_ANSWER),
    (aiohttp.ClientResponseError(REQUEST, (), status=404), Trouble.MISSING),
    (aiohttp.ClientResponseError(REQUEST, (), status=403), Trouble.DENIED),
    (aiohttp.ClientResponseError(REQUEST, (), status=503), Trouble.BUSY),
    (FileNotFoundError("k"), Trouble.MISSING),
    (PermissionError("k"), Trouble.DENIED),
    (HttpStatus(200), Trouble.BROKEN_ANSWER),
    (HttpStatus(403, "ExpiredToken"), Trouble.EXPIRED),
    (BrokenAnswer(), Trouble.BROKEN_ANSWER),
    (ObjectChanged(), Trouble.CHANGED),
    (http.client.RemoteDisconnected(), Trouble.UNREACHABLE),
    (http.client.BadStatusLine("x"), Trouble.BROKEN_ANSWER),
    (http.client.IncompleteRead(b""), Trouble.BROKEN_ANSWER),
    (socket.gaierror(-2, "Name or service not known"), Trouble.UNREACHABLE),
    (ConnectionResetError(), Trouble.UNREACHABLE),
    (ConnectionRefusedError(), Trouble.UNREACHABLE),
    (TimeoutError(), Trouble.TIMEOUT),
    (OSError(errno.EHOSTUNREACH, "no route"), Trouble.UNREACHABLE),
    (OSError(errno.EINVAL, "invalid"), Trouble.CLIENT),
    (ssl.SSLCertVerificationError(), Trouble.TLS),
    (ssl.SSLEOFError(), Trouble.UNREACHABLE),
]


@pytest.mark.parametrize(("error", "trouble"), CASES, ids=lambda value: repr(value)[:60])
def test_meaning(error: Exception, trouble: Trouble) -> None:
    assert diagnose(error).trouble is trouble
    mapped = map_error(error, file="f")
    assert trouble.retryable is isinstance(mapped, Transient) is bool(backoff(mapped))
    assert isinstance(mapped, AdapterNotFound) is (trouble is Trouble.MISSING)
    assert isinstance(mapped, VersionChanged) is (trouble is Trouble.CHANGED)
    assert mapped.file == "f"
    assert "secret" not in str(mapped)
    assert "u:p" not in str(mapped)


def test_http_filesystem_says_not_found_of_an_outage_and_we_do_not() -> None:
    outage = FileNotFoundError("http://h/k")
    outage.__cause__ = aiohttp.ClientResponseError(REQUEST, (), status=500)
    assert diagnose(outage).trouble is Trouble.SERVER


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
