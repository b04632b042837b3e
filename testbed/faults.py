"""The faults that `testbed.proxy` can put into an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """What to do to a request; the functions below make the usual ones. `name` is kept in the record of the request."""

    name: str
    status: int | None = None  # answer this at once; the upstream is not asked
    headers: Mapping[str, str] = field(default_factory=dict)  # of that answer, or in the place of the upstream's
    body: bytes = b""
    stall_s: float = 0.0  # wait: before the upstream is asked, or after `stall_after` bytes of the body
    stall_after: int | None = None
    cut_after: int | None = None  # end the connection after so many bytes of the body
    cut_with_reset: bool = False  # RST instead of FIN
    length_delta: int = 0  # announce a Content-Length that is wrong by so much
    flip_at: int | None = None  # change the byte at this offset of the body, or of the whole object
    flip_in_object: bool = False
    bytes_per_s: float | None = None
    before: Callable[[], object] | None = None  # runs in a thread before the upstream is asked
    after: Callable[[], object] | None = None  # runs when the upstream has answered, before its body is passed on


def status(code: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, name: str = "") -> Fault:
    """Answer `code` without asking the upstream."""
    return Fault(name or f"status-{code}", status=code, body=body, headers=headers or {})


def s3_error(code: int, error: str, message: str, headers: Mapping[str, str] | None = None) -> Fault:
    """Answer as S3 does: XML with the error's name."""
    xml = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{error}</Code><Message>{message}</Message></Error>'
    return status(code, xml.encode(), {"Content-Type": "application/xml", **(headers or {})}, name=error)


def server_error(code: int = 500) -> Fault:
    return s3_error(code, "InternalError", "We encountered an internal error. Please try again.")


def slow_down(retry_after_s: int | None = None) -> Fault:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return s3_error(503, "SlowDown", "Please reduce your request rate.", headers)


def too_many(retry_after_s: int = 1) -> Fault:
    """429 with Retry-After, as the Hub says it."""
    return status(429, b'{"error":"Too many requests"}', {"Retry-After": str(retry_after_s)}, name="TooManyRequests")


def denied() -> Fault:
    return s3_error(403, "AccessDenied", "Access Denied")


def expired_token(code: int = 400) -> Fault:
    """Session credentials that have run out: AWS documents a 400 for it, some S3-compatible servers say 403."""
    return s3_error(code, "ExpiredToken", "The provided token has expired.")


def reset(after: int = 0) -> Fault:
    """Reset the connection after `after` bytes of the body."""
    return Fault("reset", cut_after=after, cut_with_reset=True)


def short(after: int = 0) -> Fault:
    """Close the connection after `after` bytes, although the Content-Length promises more."""
    return Fault("short", cut_after=after)


def wrong_length(delta: int) -> Fault:
    """A Content-Length that is wrong by `delta`. When negative, the body has exactly that length: well-formed HTTP."""
    return Fault("wrong-length", length_delta=delta)


def stall(seconds: float, after: int | None = None) -> Fault:
    """Be silent for `seconds` before the headers, or after `after` bytes of the body; then go on."""
    return Fault("stall", stall_s=seconds, stall_after=after)


def flip(at: int, *, in_object: bool = False) -> Fault:
    """Change the byte at `at` of the body; with `in_object`, of the object: only a request for this byte counts."""
    return Fault("flip", flip_at=at, flip_in_object=in_object)


def relabelled(headers: Mapping[str, str]) -> Fault:
    """Pass the answer on with these headers in the place of its own, such as another ETag; without the empty ones."""
    return Fault("relabelled", headers=headers)


def throttle(bytes_per_s: float) -> Fault:
    return Fault("throttle", bytes_per_s=bytes_per_s)


def run_before(work: Callable[[], object]) -> Fault:
    """Call `work` when the request arrives, then pass it on: an object that changes between two requests."""
    return Fault("run-before", before=work)


def run_after(work: Callable[[], object]) -> Fault:
    """Call `work` when the upstream has begun to answer: an object that changes behind the back of a download."""
    return Fault("run-after", after=work)
