"""Have clients of HTTP in a process share what httpx reads of the machine's certificates: 21 ms of a core for each."""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any

from httpx._transports import default

_READ_FROM = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # else from certifi's file
_make = default.create_ssl_context


@functools.cache
def _made(*read_from: str | None) -> ssl.SSLContext:
    return _make()


def _shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if (verify, cert, trust_env) == (True, None, True):
        return _made(*map(os.environ.get, _READ_FROM))
    return _make(verify=verify, cert=cert, trust_env=trust_env)


def share() -> None:
    """From now on."""
    default.create_ssl_context = _shared
