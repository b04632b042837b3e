"""Every exception that `huggingface_hub`, its HTTP client and Xet can raise means something here."""

from __future__ import annotations

import contextlib
import errno
import importlib
import pickle
from types import ModuleType

import pytest
from huggingface_hub import errors as hub

from lora_plugins.resolvers.sources.hub.errors import Damaged, Meaning, is_local, meaning_of, retry_after, unavailable
from lora_plugins.resolvers.sources.hub.errors import _http as http_client

HTTP = http_client()

# Of parts of huggingface_hub that are never called here. What a new version adds fails the test until it is looked at.
ELSEWHERE = {
    "CLIError",
    "CLIExtensionInstallError",
    "CachedRepoTreeNotFoundError",
    "ConfirmationError",
    "DDUFCorruptedFileError",
    "DDUFError",
    "DDUFExportError",
    "DDUFInvalidEntryNameError",
    "FileDuplicationError",
    "InferenceEndpointError",
    "InferenceEndpointTimeoutError",
    "NotASafetensorsRepoError",
    "SafetensorsParsingError",
    "SandboxCommandError",
    "SandboxError",
    "StrictDataclassClassValidationError",
    "StrictDataclassDefinitionError",
    "StrictDataclassError",
    "StrictDataclassFieldValidationError",
    "CookieConflict",
    "SSEError",
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


@pytest.mark.parametrize("kind", [k for m in modules() for k in exceptions(m)], ids=lambda kind: kind.__qualname__)
def test_no_exception_is_unknown(kind):
    if kind.__name__ in ELSEWHERE:
        return
    assert meaning_of(made(kind)) is not None, f"{kind.__module__}.{kind.__qualname__} is new: say what it means"


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (answer(404, hub.RepositoryNotFoundError), Meaning.ABSENT),
        (answer(404, hub.RevisionNotFoundError), Meaning.ABSENT),
        (answer(404, hub.RemoteEntryNotFoundError), Meaning.ABSENT),
        (answer(401, hub.RepositoryNotFoundError), Meaning.HIDDEN),
        (answer(403, hub.RepositoryNotFoundError), Meaning.DENIED),
        (answer(401, hub.GatedRepoError), Meaning.GATED),
        (answer(403, hub.GatedRepoError), Meaning.GATED),
        (answer(403, hub.DisabledRepoError), Meaning.DENIED),
        (answer(401), Meaning.DENIED),
        (answer(403), Meaning.DENIED),
        (answer(404), Meaning.BROKEN),
        (answer(400, hub.BadRequestError), Meaning.BROKEN),
        (answer(416), Meaning.BROKEN),
        *((answer(status), Meaning.BUSY) for status in (408, 429, 500, 502, 503, 504)),
        (answer(503, hub.RepositoryNotFoundError), Meaning.BUSY),
        (hub.OfflineModeIsEnabled("x"), Meaning.OFFLINE),
        (HTTP.ConnectError("x"), Meaning.UNREACHABLE),
        (HTTP.ReadTimeout("x"), Meaning.UNREACHABLE),
        (HTTP.UnsupportedProtocol("x"), Meaning.BROKEN),
        (HTTP.TooManyRedirects("x"), Meaning.BROKEN),
        (OSError("Consistency check failed"), Meaning.UNREACHABLE),
        (ConnectionResetError(errno.ECONNRESET, "x"), Meaning.UNREACHABLE),
        (RuntimeError("Cannot send a request, as the client has been closed."), Meaning.UNREACHABLE),
        (ValueError("not JSON"), Meaning.BROKEN),
        (KeyError("id"), Meaning.BROKEN),
        (Damaged("x"), Meaning.UNREACHABLE),
        (OSError(errno.ENOSPC, "x"), None),
        (PermissionError(errno.EACCES, "x"), None),
        (Exception("x"), None),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}"[:60],
)
def test_what_an_error_means(error, meaning):
    assert meaning_of(error) is meaning
    assert is_local(error) is (getattr(error, "errno", None) in (errno.ENOSPC, errno.EACCES))
    assert (retry_after(error) is True) is (meaning in (Meaning.BUSY, Meaning.UNREACHABLE))


def test_what_is_not_on_disk_either_means_what_stands_behind_it():
    for cause, meaning in [(answer(503), Meaning.BUSY), (answer(403), Meaning.DENIED), (None, Meaning.OFFLINE)]:
        error = hub.LocalEntryNotFoundError("x")
        error.__cause__ = cause
        assert meaning_of(error) is meaning
        if cause is not None:
            assert f"HTTP {cause.response.status_code}" in str(unavailable(error, "org/repo@main", token=False))


@pytest.mark.parametrize(
    ("header", "wait"), [("3", 3.0), ("100000", 30.0), ("0", True), ("Wed, 21 Oct 2015 07:28:00 GMT", True), ("", True)]
)
def test_the_hub_says_how_long_to_wait(header, wait):
    assert retry_after(answer(429, **{"Retry-After": header})) == wait


def test_a_cancellation_is_not_repeated():
    assert retry_after(KeyboardInterrupt()) is False


@pytest.mark.parametrize("kind", [k for m in modules() for k in exceptions(m)], ids=lambda kind: kind.__qualname__)
@pytest.mark.parametrize("token", [True, False])
def test_every_error_can_be_said(kind, token):
    error = unavailable(made(kind), "org/repo@main", token=token)
    assert "org/repo@main" in str(error)
    assert error.expected
    assert error.remedy
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
