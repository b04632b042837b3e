"""Map errors of `huggingface_hub`, its HTTP client and Xet to this package's errors.

Called by `hub.py` in the thread of each call to the Hub. The kinds are those of `remote_failures.py`; the right column
says what a look-up or a fetch makes of them:

```
MISSING   404 with the Hub's own error code         absent, or VersionChanged while fetching
HIDDEN    401 for a repository: missing or private  L006 where an entry names the repository, else absent; while
                                                    fetching, VersionChanged
OFFLINE   HF_HUB_OFFLINE                            what the Hub's cache holds, else L006
TLS       a certificate, or the file of trusted     L006 at once
REFUSED   an answer that is not the Hub's           L006
others                                              L006, after retries where they may help
```
"""

from __future__ import annotations

from huggingface_hub import errors as hub

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.resolvers.sources import remote_failures as remote
from lora_plugins.resolvers.sources.remote_failures import Failure, FailureKind, kind_of, kind_of_status, table_of

_OF_HTTPX = table_of(
    {
        FailureKind.TIMEOUT: "httpx.TimeoutException",
        # Also connections that another thread has closed, and a shared client or transfers of Xet closed meanwhile.
        FailureKind.UNREACHABLE: """
            httpx.NetworkError httpx.ProxyError httpx.RemoteProtocolError httpx.StreamError builtins.RuntimeError
            huggingface_hub.RevisionResolutionError huggingface_hub.XetDownloadError
            huggingface_hub.XetRefreshTokenError huggingface_hub.XetError
            """,
        # No repository can have the name that validation refuses.
        FailureKind.MISSING: """
            huggingface_hub.RevisionNotFoundError huggingface_hub.RemoteEntryNotFoundError
            huggingface_hub.HFValidationError
            """,
        FailureKind.GATED: "huggingface_hub.GatedRepoError",
        FailureKind.DENIED: """
            huggingface_hub.DisabledRepoError huggingface_hub.LocalTokenNotFoundError huggingface_hub.OIDCError
            huggingface_hub.DeviceCodeError huggingface_hub.XetAuthorizationError hf_xet.XetAuthenticationError
            """,
        FailureKind.OFFLINE: "huggingface_hub.OfflineModeIsEnabled huggingface_hub.LocalEntryNotFoundError",
        # Not the Hub's answers: another server's error page, or JSON without required fields.
        FailureKind.REFUSED: """
            httpx.InvalidURL httpx.HTTPError huggingface_hub.HfHubHTTPError huggingface_hub.FileMetadataError
            huggingface_hub.EntryNotFoundError huggingface_hub.CacheNotFound huggingface_hub.CorruptedCacheException
            hf_xet.XetObjectNotFoundError
            builtins.ValueError builtins.LookupError builtins.TypeError builtins.AttributeError
            """,
    }
)
# The client of huggingface_hub is httpx in 1.x, and httpx2 since 2.x.
_TABLE = {**_OF_HTTPX, **{name.replace("httpx.", "httpx2."): kind for name, kind in _OF_HTTPX.items()}}


def kind_of_type(error_type: type[BaseException]) -> FailureKind | None:
    """The kind of an exception type, for instances without a better hint; None where unknown."""
    return kind_of(error_type, _TABLE)


def diagnose(error: BaseException) -> Failure:
    """Find the kind of a failure."""
    if isinstance(error, hub.LocalEntryNotFoundError) and error.__cause__ is not None:
        return diagnose(error.__cause__)  # "not on disk either": the cause is the failure of the request to the Hub
    name = type(error).__name__
    if isinstance(error, hub.HfHubHTTPError):
        status = error.response.status_code
        wait_s = remote.retry_after(error.response.headers.get("Retry-After"))
        return Failure(_kind_of_answer(error, status), f"{name}, HTTP {status}", wait_s)
    if (cause := remote.untrusted(error)) is not None:
        return Failure(FailureKind.TLS, type(cause).__name__)
    return Failure(kind_of_type(type(error)) or FailureKind.UNKNOWN, name)


def is_local(error: BaseException) -> bool:
    """Whether the local file system failed, as with a full disk; the store explains such errors."""
    is_remote = isinstance(error, (ConnectionError, TimeoutError, hub.HfHubHTTPError)) or remote.untrusted(error)
    return isinstance(error, OSError) and error.errno is not None and not is_remote


def map_error(error: Exception, where: str, *, has_token: bool) -> Exception:
    """This package's error for any library's error: AdapterNotFound or a RemoteFailure; local errors stay unchanged.

    Args:
        error: any error of a call to the Hub.
        where: the target, as `org/repo@revision`.
        has_token: whether the request had a token.
    """
    if isinstance(error, LoRAPluginsError) or is_local(error):
        return error
    failure = diagnose(error)
    sign_in = "check that the account of the token may read it" if has_token else "set HF_TOKEN, or run 'hf auth login'"
    is_revision = isinstance(error, hub.RevisionNotFoundError)
    said = {
        FailureKind.MISSING: (f"no such {'revision' if is_revision else 'repository'}, {where}", ""),
        FailureKind.GATED: (f"a gated repository, {where}", f"accept its terms on its page on the Hub, and {sign_in}"),
        FailureKind.HIDDEN: (f"a repository that is missing or private, {where}", f"check its name, and {sign_in}"),
        FailureKind.DENIED: (f"a Hub that denies {where}", f"{sign_in}; an expired token is refused everywhere"),
        FailureKind.OFFLINE: (f"offline mode, and {where} not whole in the Hub's cache", ""),
        FailureKind.REFUSED: (f"an answer that is not the Hub's for {where}", "check HF_ENDPOINT, proxies, firewalls"),
        FailureKind.TLS: (
            f"{FailureKind.TLS.found}, for {where}",
            "check HF_ENDPOINT; SSL_CERT_FILE names a file with a company's own CA, and REQUESTS_CA_BUNDLE is not read",
        ),
    }
    found, remedy = said.get(
        failure.kind,
        (f"a Hub that does not serve {where}", "ask again later; check HF_ENDPOINT and the network if it stays"),
    )
    return failure.as_error("a Hub", found=found, expected="an adapter that this server may read", remedy=remedy)


def _kind_of_answer(error: hub.HfHubHTTPError, status: int) -> FailureKind:
    kind = kind_of_status(status)
    # A 429 or 5xx outranks the library's class: the class would make a passing failure permanent.
    if kind.is_retryable:
        return kind
    # By exact type: GatedRepoError derives from RepositoryNotFoundError.
    if type(error) is hub.RepositoryNotFoundError:
        return {401: FailureKind.HIDDEN, 404: FailureKind.MISSING}.get(status, FailureKind.DENIED)
    if kind is FailureKind.DENIED and not isinstance(error, hub.GatedRepoError):
        return kind
    return kind_of_type(type(error)) or FailureKind.REFUSED
