"""What the errors of `huggingface_hub` and its HTTP client mean; the only place where they become ours.

```
ABSENT       404 with the Hub's own error code         None, or VersionChanged while fetching
HIDDEN       401 for a repository: missing or private  L006 where an entry names the repository, else None
GATED        401 or 403, access must be asked for      L006
DENIED       other 401 and 403, disabled, no token     L006
OFFLINE      HF_HUB_OFFLINE                            what the Hub's cache holds, else L006
BUSY         408, 429 and 5xx                          retried, then L006
UNREACHABLE  no connection, time-out, broken off       retried, then L006
BROKEN       an answer that is not the Hub's           L006
```
"""

from __future__ import annotations

import sys
from enum import Enum, auto
from types import ModuleType
from typing import Any

from huggingface_hub import errors as hub

from lora_plugins.errors import SourceUnavailable

_MAX_WAIT_S = 30.0


class Meaning(Enum):
    """What an error says of the repository and of the Hub; see the table above."""

    ABSENT = auto()
    HIDDEN = auto()
    GATED = auto()
    DENIED = auto()
    OFFLINE = auto()
    BUSY = auto()
    UNREACHABLE = auto()
    BROKEN = auto()


class Damaged(Exception):
    """A file that arrived with other bytes than the Hub promised."""


def _http() -> ModuleType:
    """The HTTP client behind `huggingface_hub`: httpx in 1.x, httpx2 since 2.x."""
    base = hub.HfHubHTTPError.__mro__[1]
    return sys.modules[base.__module__.partition(".")[0]]


def _table() -> list[tuple[type[BaseException], Meaning]]:
    http = _http()
    kinds: list[tuple[Any, str, Meaning]] = [
        # A class stands before its bases. HfHubHTTPError itself is told by its status.
        (hub, "GatedRepoError", Meaning.GATED),
        (hub, "RevisionNotFoundError", Meaning.ABSENT),
        (hub, "RemoteEntryNotFoundError", Meaning.ABSENT),
        (hub, "HFValidationError", Meaning.ABSENT),  # no repository can have this name
        (hub, "DisabledRepoError", Meaning.DENIED),
        (hub, "LocalTokenNotFoundError", Meaning.DENIED),
        (hub, "OIDCError", Meaning.DENIED),
        (hub, "DeviceCodeError", Meaning.DENIED),
        (hub, "OfflineModeIsEnabled", Meaning.OFFLINE),
        (hub, "LocalEntryNotFoundError", Meaning.OFFLINE),
        (hub, "RevisionResolutionError", Meaning.UNREACHABLE),
        (hub, "XetDownloadError", Meaning.UNREACHABLE),
        (hub, "XetAuthorizationError", Meaning.DENIED),  # these three in 1.x only
        (hub, "XetRefreshTokenError", Meaning.UNREACHABLE),
        (hub, "XetError", Meaning.UNREACHABLE),
        (hub, "FileMetadataError", Meaning.BROKEN),
        (hub, "EntryNotFoundError", Meaning.BROKEN),
        (hub, "CacheNotFound", Meaning.BROKEN),
        (hub, "CorruptedCacheException", Meaning.BROKEN),
        (http, "TimeoutException", Meaning.UNREACHABLE),
        (http, "NetworkError", Meaning.UNREACHABLE),
        (http, "ProxyError", Meaning.UNREACHABLE),
        (http, "RemoteProtocolError", Meaning.UNREACHABLE),
        (http, "HTTPError", Meaning.BROKEN),
        (http, "StreamError", Meaning.UNREACHABLE),  # a connection that another thread has closed
        (http, "InvalidURL", Meaning.BROKEN),
    ]
    xet = sys.modules.get("hf_xet")
    kinds += [
        (xet, "XetAuthenticationError", Meaning.DENIED),
        (xet, "XetObjectNotFoundError", Meaning.BROKEN),
    ]
    found = [(getattr(module, name), meaning) for module, name, meaning in kinds if hasattr(module, name)]
    return [
        *found,
        (Damaged, Meaning.UNREACHABLE),
        (TimeoutError, Meaning.UNREACHABLE),
        (ConnectionError, Meaning.UNREACHABLE),
        (OSError, Meaning.UNREACHABLE),  # "Consistency check failed": the length is wrong; `is_local` are others
        (RuntimeError, Meaning.UNREACHABLE),  # httpx: the shared client was closed meanwhile; also Xet's transfers
        (ValueError, Meaning.BROKEN),  # what should be JSON
        (LookupError, Meaning.BROKEN),  # JSON without what it must hold
        (TypeError, Meaning.BROKEN),
        (AttributeError, Meaning.BROKEN),
    ]


def meaning_of(error: BaseException) -> Meaning | None:
    """What an error means; None for one that this module does not know, and for errors of the local disk."""
    if is_local(error):
        return None
    if isinstance(error, hub.LocalEntryNotFoundError) and error.__cause__ is not None:
        return meaning_of(error.__cause__)  # "not on disk either": why it was not had from the Hub stands behind it
    if isinstance(error, hub.HfHubHTTPError):
        status = error.response.status_code
        if status in {408, 429} or status >= 500:
            return Meaning.BUSY
        if type(error) is hub.RepositoryNotFoundError:
            return {401: Meaning.HIDDEN, 404: Meaning.ABSENT}.get(status, Meaning.DENIED)
        if status in (401, 403) and not isinstance(error, hub.GatedRepoError):
            return Meaning.DENIED
    return next((meaning for kind, meaning in _table() if isinstance(error, kind)), None)


def is_local(error: BaseException) -> bool:
    """Whether the local file system failed, as with a full disk; the store says what that means."""
    return (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, (ConnectionError, TimeoutError, hub.HfHubHTTPError))
    )


def retry_after(error: BaseException) -> bool | float:
    """For `stamina`: whether to try again after an error, or the seconds to wait before that."""
    meaning = meaning_of(error)
    if meaning is Meaning.BUSY:
        response = error.response if isinstance(error, hub.HfHubHTTPError) else None
        seconds = response.headers.get("Retry-After", "") if response is not None else ""
        if seconds.isdecimal():
            return min(float(seconds), _MAX_WAIT_S) or True
    return meaning in (Meaning.BUSY, Meaning.UNREACHABLE)


def unavailable(error: BaseException, where: str, *, token: bool) -> SourceUnavailable:
    """Our error for one that leaves open whether `where`, as `org/repo@revision`, has the adapter.

    `token` says whether one was sent.
    """
    meaning = meaning_of(error)
    status = _status(error)
    sign_in = "check that the account of the token may read it" if token else "set HF_TOKEN, or run 'hf auth login'"
    if meaning is Meaning.GATED:
        return SourceUnavailable(
            f"a gated repository, {where}",
            expected="access that its owner has granted",
            remedy=f"accept its terms on its page on the Hub, and {sign_in}",
        )
    if meaning in (Meaning.HIDDEN, Meaning.ABSENT):
        return SourceUnavailable(
            f"a repository that is missing or private, {where}",
            expected="one that this server may read",
            remedy=f"check its name, and {sign_in}",
        )
    if meaning is Meaning.DENIED:
        return SourceUnavailable(
            f"a Hub that denies {where}{status}",
            expected="a repository and a token that the Hub accepts",
            remedy=f"{sign_in}; a token that has expired is refused everywhere",
        )
    if meaning is Meaning.OFFLINE:
        return SourceUnavailable(
            f"offline mode, and {where} not whole in the Hub's cache",
            expected="an adapter that was downloaded before",
            remedy="unset HF_HUB_OFFLINE, or run 'hf download' where there is a network",
        )
    if meaning is Meaning.BROKEN:
        return SourceUnavailable(
            f"an answer that is not the Hub's for {where} ({type(error).__name__}{status})",
            expected="the Hub's API",
            remedy="check HF_ENDPOINT, proxies and firewalls",
        )
    return SourceUnavailable(
        f"a Hub that does not serve {where} ({type(error).__name__}{status})",
        expected="an answer",
        remedy="ask again later; check HF_ENDPOINT and the network if it stays",
    )


def _status(error: BaseException) -> str:
    if isinstance(error, hub.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _status(error.__cause__)
    return f", HTTP {error.response.status_code}" if isinstance(error, hub.HfHubHTTPError) else ""
