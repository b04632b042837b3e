"""Decide who may administer: by the access policy, by an admin key, by vLLM's keys, or by the caller's address.

Runs in the API server, for every connection, before the body is read. In: the ASGI scope. Out: a `Principal`, and for
a caller without the right the refusal with its remedy. `principals.py` asks.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass

from starlette.types import Scope

from lora_plugins.api.access.policy import Policy, Principal
from lora_plugins.errors import NotAllowed

ADMIN_KEY = "LORA_PLUGINS_ADMIN_KEY"
SEND_THE_KEY = "send it as 'Authorization: Bearer KEY'"  # the remedy where only a right key is missing
_HOLDER = Principal("(admin key)", is_admin=True)
_KEY_OF_VLLM = Principal("(--api-key)", is_admin=True)
_LOCAL = Principal("(this machine)", is_admin=True)
_OTHER = Principal("(other)")
# Headers with which a proxy names its client; all names that begin with `_OF_PROXIES_PREFIX`, too.
_OF_PROXIES = (b"forwarded", b"via", b"x-real-ip")
_OF_PROXIES_PREFIX = b"x-forwarded-"
_HOST = re.compile(r"(?:(?P<name>[^:\[\]]+)|\[(?P<address>[0-9a-f:.]+)\])(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Administrators:
    """The rule of one API server, which follows from the server's start options.

    Attributes:
        policy: administrators are its tenants with `admin = true`.
        key: callers with this key are administrators (`LORA_PLUGINS_ADMIN_KEY`).
        keys_of_vllm: keys of `--api-key`; without policy and `key`, callers with one of the keys are administrators,
            also on routes for which vLLM itself needs no key.
        is_unix_socket: whether the server listens on a Unix socket, whose callers have no address and are local.
    """

    policy: Policy | None = None
    key: str | None = None
    keys_of_vllm: tuple[str, ...] = ()
    is_unix_socket: bool = False

    def principal(self, scope: Scope) -> Principal:
        """The principal of a connection."""
        sent = bearer(scope)
        # The admin key comes first: a policy must not lock its holder out.
        if self.key is not None and sent is not None and _are_equal(sent, self.key):
            return _HOLDER
        if self.policy is not None:
            return self.policy.of_key(sent)
        if self.key is not None:
            return _OTHER
        if self.keys_of_vllm:
            # Compare with every key, so that the time shows nothing of the position of a match.
            known = [_are_equal(sent or "", key) for key in self.keys_of_vllm]
            return _KEY_OF_VLLM if any(known) else _OTHER
        return _LOCAL if self._why_not_local(scope) is None else _OTHER

    def refusal(self, scope: Scope) -> NotAllowed:
        """The refusal for a caller who is no administrator, with the remedy."""
        if self.policy is not None:
            return forbidden()
        if not self.is_by_address:
            return NotAllowed(
                "no key in the Authorization header" if bearer(scope) is None else "another key",
                expected="a key of --api-key" if self.key is None else f"the key of {ADMIN_KEY}",
                remedy=SEND_THE_KEY,
            )
        return NotAllowed(
            self._why_not_local(scope) or "a caller that nothing is known of",
            expected="one on the server's own machine, as the server has no key for its admin API",
            remedy=f"set {ADMIN_KEY} for the server, and {SEND_THE_KEY}",
        )

    def asks_for_key(self, scope: Scope) -> bool:
        """Whether the connection lacks only a key."""
        return self.policy is None and not self.is_by_address and bearer(scope) is None

    def in_words(self) -> str:
        """The rule in words, for the log."""
        holders = []
        if self.policy is not None:
            holders.append("keys with admin rights in the access policy")
        if self.key is not None:
            holders.append(f"the key of {ADMIN_KEY}")
        if not holders and self.keys_of_vllm:
            holders.append("every key of --api-key")
        if holders:
            return " and ".join(holders)
        return "whoever can connect to the Unix socket" if self.is_unix_socket else "callers on this machine (loopback)"

    @property
    def is_by_address(self) -> bool:
        """Whether the caller's address decides, without a key."""
        return self.policy is None and self.key is None and not self.keys_of_vllm

    def _why_not_local(self, scope: Scope) -> str | None:
        """Why this connection may come from elsewhere; None where the connection comes from this machine."""
        client = scope.get("client")
        if client is None:
            # A closed TCP connection has no address either, so only the listening socket decides.
            if not self.is_unix_socket:
                return "a caller without an address"
        elif not is_loopback(client[0]):
            return "a caller on another machine"
        for name, value in ((name.lower(), value) for name, value in scope["headers"]):
            if name == b"host" and client is not None and not _is_own_name(value.decode("latin-1")):
                # DNS rebinding: a web page whose name resolves to this machine's address can read the answers to its
                # calls.
                return f"a call under a name that is not this machine's own, {value[:80].decode('latin-1')}"
            # A proxy on this machine has a loopback address, but its clients may be anywhere.
            if name in _OF_PROXIES or name.startswith(_OF_PROXIES_PREFIX):
                return "a call that a proxy has passed on"
            # Browsers send Origin with calls of web pages, so a page of another site could use a local browser as its
            # proxy.
            if name == b"origin" and not _is_page_of_this_machine(value.decode("latin-1")):
                return "a call of a web page"
        return None


def forbidden() -> NotAllowed:
    """The refusal for callers whom the access policy knows, but gives no admin rights."""
    return NotAllowed(
        "a key without admin rights in the server's access policy",
        expected="one with them",
        remedy="use another key, or set admin = true for its tenant",
    )


def bearer(scope: Scope) -> str | None:
    """The key of the first Authorization header, read as vLLM's `AuthenticationMiddleware` (0.32) reads the header."""
    for name, value in scope["headers"]:
        if name.lower() == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            return key if scheme.lower() == "bearer" else None
    return None


@functools.lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address of this machine, also IPv4 written as IPv6; False for names."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # A socket for both families shows an IPv4 caller as ::ffff:127.0.0.1.
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_page_of_this_machine(origin: str) -> bool:
    """Whether an Origin header is of a page of this machine; a local browser also shows pages of other machines."""
    scheme, separator, host = origin.partition("://")
    return bool(scheme and separator) and _is_own_name(host)


def _is_own_name(host: str) -> bool:
    """Whether a Host header has a name that only this machine uses for itself, whatever the port."""
    match = _HOST.fullmatch(host.lower())
    return match is not None and (match["name"] == "localhost" or is_loopback(match["name"] or match["address"]))


def _are_equal(sent: str, key: str) -> bool:
    # In constant time, and of digests, which have one length: the time shows neither content nor length.
    digests = (hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (sent, key))
    return hmac.compare_digest(*digests)
