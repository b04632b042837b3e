"""Certificates: a server's own, and what clients of HTTP in a process share of the machine's.

httpx reads the machine's for each client, which takes 21 ms of a core.
"""

from __future__ import annotations

import functools
import os
import ssl
import subprocess
from pathlib import Path
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


def self_signed(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Make a certificate for `localhost` that no machine trusts; return its file, and a server's context."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
