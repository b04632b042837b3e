"""Every exception that `huggingface_hub`, its HTTP client and Xet can raise means something here."""

from __future__ import annotations

import contextlib
import errno
import importlib
import pickle
import ssl
from types import ModuleType

import pytest
from huggingface_hub import errors as hub

from lora_plugins.errors import AdapterNotFound
from lora_plugins.resolvers.sources.hub_failures import diagnose, is_local, kind_of_type, map_error
from lora_plugins.resolvers.sources.remote_failures import BrokenAnswer, FailureKind, RemoteFailure
from lora_plugins.resolvers.sources.retries import backoff

# The HTTP client behind huggingface_hub: httpx in 1.x, httpx2 since 2.x.
HTTP = importlib.import_module(hub.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])

# Of parts of huggingface_hub that are never called here. What a new version adds fails the test until it is looked at.
ELSEWHERE = {
    *("CLIError", "CLIExtensionInstallError", "CachedRepoTreeNotFoundError", "ConfirmationError"),
    *("DDUFCorruptedFileError", "DDUFError", "DDUFExportError", "DDUFInvalidEntryNameError"),
    *("FileDuplicationError", "InferenceEndpointError", "InferenceEndpointTimeoutError"),
    *("NotASafetensorsRepoError", "SafetensorsParsingError", "SandboxCommandError", "SandboxError"),
    *("StrictDataclassClassValidationError", "StrictDataclassDefinitionError", "StrictDataclassError"),
    *("StrictDataclassFieldValidationError", "CookieConflict", "SSEError"),
}


def exceptions(module: ModuleType) -> list[type[Exception]]:
    found = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Exception)]
    return sorted(found, key=lambda kind: kind.__name__)


def modules() -> list[ModuleType]:
    found = [hub, HTTP]
    with contextlib.suppress(ImportError):
        found.append(importlib.import_module("hf_xet"))
    return found


def answer(status: int, kind: type[Exception] | None = None, **headers: str) -> Exception:
    """A `kind` as `huggingface_hub` makes it of an answer with this status."""
    response = HTTP.Response(status, headers=headers, request=HTTP.Request("GET", "http://hub/api/models/org/repo"))
    return (kind or hub.HfHubHTTPError)("text", response=response)


def made(kind: type[Exception]) -> Exception:
    if issubclass(kind, hub.HfHubHTTPError):
        return answer(418, kind)
    error = kind.__new__(kind)
    BaseException.__init__(error, "text")
    return error


ERRORS = [kind for module in modules() for kind in exceptions(module)]


def mapped(error: Exception, *, has_token: bool = False) -> Exception:
    return map_error(error, "org/repo@main", has_token=has_token)


@pytest.mark.parametrize("error_type", ERRORS, ids=lambda kind: kind.__qualname__)
def test_every_exception_type_has_a_kind_and_a_message(error_type):
    new = f"{error_type.__module__}.{error_type.__qualname__} is new: say what it means"
    assert kind_of_type(error_type) is not None or error_type.__name__ in ELSEWHERE, new
    for has_token in (True, False):
        error = mapped(made(error_type), has_token=has_token)
        assert "org/repo@main" in str(error)
        assert error.expected
        assert error.remedy
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


ANSWERS = {
    FailureKind.MISSING: [
        (404, kind) for kind in (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.RemoteEntryNotFoundError)
    ],
    FailureKind.HIDDEN: [(401, hub.RepositoryNotFoundError)],
    FailureKind.GATED: [(401, hub.GatedRepoError), (403, hub.GatedRepoError)],
    FailureKind.DENIED: [(403, hub.RepositoryNotFoundError), (403, hub.DisabledRepoError), (401,), (403,)],
    FailureKind.REFUSED: [(404,), (400, hub.BadRequestError), (416,)],
    FailureKind.BUSY: [(429,), (503,), (503, hub.RepositoryNotFoundError)],
    FailureKind.SERVER: [(500,), (502,)],
    FailureKind.TIMEOUT: [(408,), (504,)],
}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *((answer(*given), kind) for kind, them in ANSWERS.items() for given in them),
        (hub.OfflineModeIsEnabled("x"), FailureKind.OFFLINE),
        (HTTP.ConnectError("x"), FailureKind.UNREACHABLE),
        (HTTP.ReadTimeout("x"), FailureKind.TIMEOUT),
        (HTTP.UnsupportedProtocol("x"), FailureKind.REFUSED),
        (HTTP.TooManyRedirects("x"), FailureKind.REFUSED),
        (OSError("Consistency check failed"), FailureKind.UNREACHABLE),
        (ConnectionResetError(errno.ECONNRESET, "x"), FailureKind.UNREACHABLE),
        (RuntimeError("Cannot send a request, as the client has been closed."), FailureKind.UNREACHABLE),
        (ValueError("not JSON"), FailureKind.REFUSED),
        (KeyError("id"), FailureKind.REFUSED),
        (BrokenAnswer("x"), FailureKind.BROKEN_ANSWER),
        (Exception("x"), FailureKind.UNKNOWN),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}"[:60],
)
def test_each_failure_has_its_kind_and_error(error, kind):
    assert diagnose(error).kind is kind
    ours = mapped(error)
    assert isinstance(ours, AdapterNotFound if kind is FailureKind.MISSING else RemoteFailure)
    assert (backoff(ours) is True) is kind.is_retryable


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", FailureKind.TLS),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca", FailureKind.TLS),
        ("[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] bad record mac", FailureKind.UNREACHABLE),
    ],
)
def test_a_damaged_record_passes_and_a_certificate_does_not(reason, kind):
    error = HTTP.ReadError("x")
    error.__context__ = ssl.SSLError(1, reason)
    assert diagnose(error).kind is kind


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_errors_of_the_local_disk_stay_as_they_are(code):
    error = OSError(code, "x")
    assert is_local(error)
    assert mapped(error) is error
    assert backoff(error) is False


def test_a_file_missing_locally_means_what_its_cause_means():
    for cause, kind in [
        (answer(503), FailureKind.BUSY),
        (answer(403), FailureKind.DENIED),
        (None, FailureKind.OFFLINE),
    ]:
        error = hub.LocalEntryNotFoundError("x")
        error.__cause__ = cause
        assert diagnose(error).kind is kind
        if cause is not None:
            assert f"HTTP {cause.response.status_code}" in str(mapped(error))


@pytest.mark.parametrize(
    ("header", "wait"), [("3", 3.0), ("100000", 30.0), ("0", True), ("Wed, 21 Oct 2015 07:28:00 GMT", True), ("", True)]
)
def test_retry_after_is_kept_and_bounded(header, wait):
    assert backoff(mapped(answer(429, **{"Retry-After": header}))) == wait
