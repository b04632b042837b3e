"""A client of the admin API for trainers: push an adapter to one or several servers, all or none; no vLLM, no torch.

Runs in the trainer's process. Each function calls all servers at once, and raises an error with the answers of the
servers that did not do as they were asked; functions that end in `_async` are for programs with an event loop.

    from lora_plugins.client import pause, push, resume
    from peft import get_peft_model_state_dict

    weights, config = get_peft_model_state_dict(model), model.peft_config["default"].to_dict()
    servers = ["http://localhost:8000"]
    pause("policy", "keep", servers=servers)
    push("policy", weights, config, servers=servers, mode="inflight")
    resume("policy", servers=servers)

Only `httpx` is needed; `push` takes tensors where torch is installed, arrays of numpy anywhere.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from lora_plugins.client.attempt import Attempt, Heard, answers_of, error_of, served_digests
from lora_plugins.client.body import body_of

_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")  # as URLs have them
# `mounts` of httpx's clients: a proxy of the environment would get the key, and ask its own machine.
_DIRECT = {f"all://{host}": None for host in _THIS_MACHINE}
_HERE = re.compile(rf"https?://({'|'.join(map(re.escape, _THIS_MACHINE))})(:\d*)?(/|$)", re.IGNORECASE)


class CallFailed(Exception):
    """Some servers did not do as they were asked.

    Attributes:
        errors: the answers of these servers.
    """

    def __init__(self, errors: Mapping[str, str], further: str = "") -> None:
        self.errors = dict(errors)
        super().__init__("; ".join(f"{server}: {error}" for server, error in errors.items()) + further)


class PushFailed(CallFailed):
    """Some servers do not serve the pushed version; each server that had taken it serves its earlier version again.

    Attributes:
        errors: the answers of the servers that did not take the version.
        not_rolled_back: servers that serve the pushed version nevertheless, or may serve it: their rollback failed,
            or their answer was lost, and they did not show what they serve.
    """

    def __init__(self, errors: Mapping[str, str], not_rolled_back: Sequence[str] = ()) -> None:
        self.not_rolled_back = tuple(not_rolled_back)
        super().__init__(errors, f"; not rolled back: {', '.join(not_rolled_back)}" if not_rolled_back else "")


@dataclass(frozen=True)
class Pushed:
    """The result of a push.

    Attributes:
        digest: of the version that all servers serve.
        previous_digests: by server, of the version before; None where the name was not served.
        timings: by server, milliseconds of each stage.
    """

    digest: str
    previous_digests: Mapping[str, str | None]
    timings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def push(name: str, adapter: Any, config: Mapping[str, Any] | None = None, **options: Any) -> Pushed:
    """Call `push_async`, for callers without an event loop."""
    return asyncio.run(push_async(name, adapter, config, **options))


def wait_served(name: str, digest: str, servers: Sequence[str], *, timeout_s: float = 60.0, **options: Any) -> None:
    """Wait until each server serves `digest` under the name.

    Raises:
        TimeoutError: a server does not within `timeout_s`.
        CallFailed: a server denies access.
    """
    asyncio.run(wait_served_async(name, digest, servers, timeout_s=timeout_s, **options))


def pause(name: str, mode: str = "wait", **options: Any) -> None:
    """Call `pause_async`, for callers without an event loop."""
    asyncio.run(pause_async(name, mode, **options))


def resume(name: str, **options: Any) -> None:
    """Call `resume_async`, for callers without an event loop."""
    asyncio.run(resume_async(name, **options))


async def push_async(
    name: str,
    adapter: Any,
    config: Mapping[str, Any] | None = None,
    *,
    servers: Sequence[str],
    key: str | None = None,
    if_match: str | None = None,
    mode: str = "finish",
    keep: int | None = None,
    pin: bool = False,
    timeout_s: float = 300.0,
) -> Pushed:
    """Have every server serve `adapter` as the next version of `name`.

    A cancellation undoes a push to several servers, as a failure does.

    Args:
        name: the model name of requests.
        adapter: a PEFT directory, or a mapping from tensor names to tensors, which needs `config`.
        config: the content of adapter_config.json.
        servers: base URLs without a login, or one; of servers, or of applications on Ray Serve.
        key: of an administrator.
        if_match: the digest that each server must serve now, `*` for any.
        mode: `finish`, or `inflight`: running requests go on with the new version.
        keep: how many earlier versions stay for `name@digest`.
        pin: keep the adapter in host memory and in a slot; a rollback keeps the pin.
        timeout_s: of each call.

    Raises:
        PushFailed: a server did not take the version; the others were rolled back to their earlier versions.
    """
    body, headers = body_of(adapter, config)
    query = {"mode": mode, **({} if keep is None else {"keep": str(keep)}), **({"pin": "true"} if pin else {})}
    headers |= {} if if_match is None else {"If-Match": if_match}
    addresses = _addresses(servers)
    async with _client(addresses, key, timeout_s) as client:
        attempts = {it: Attempt(client, _url(it, name), query) for it in addresses}
        looks_first = len(attempts) > 1
        try:
            await asyncio.gather(*(it.send(body, headers, looks_first=looks_first) for it in attempts.values()))
        except asyncio.CancelledError as cancelled:
            if len(attempts) > 1 and (left := await _undo(attempts)):
                cancelled.add_note(f"the push is not rolled back: {', '.join(left)}")
            raise
        if errors := _push_errors(attempts):
            raise PushFailed(errors, await _undo(attempts))
    done = {server: it.answers[0].body for server, it in attempts.items()}
    previous = {server: one.get("previous_digest") for server, one in done.items()}
    return Pushed(_pushed(attempts).pop(), previous, {server: one.get("timings", {}) for server, one in done.items()})


async def wait_served_async(
    name: str,
    digest: str,
    servers: Sequence[str],
    *,
    key: str | None = None,
    timeout_s: float = 60.0,
    interval_s: float = 0.2,
) -> None:
    """Wait as `wait_served` does, in an event loop."""
    deadline, missing = time.monotonic() + timeout_s, _addresses(servers)
    async with _client(missing, key, timeout_s) as client:
        while missing:
            heard = await _heard(missing, [client.get(_url(server, name)) for server in missing])
            said = [(server, it) for server, answer in heard.items() for it in answers_of(answer)]
            if denied := {server: it.text for server, it in said if it.status in (401, 403)}:
                raise CallFailed(denied)
            missing = [server for server, answer in heard.items() if served_digests(answer) != {digest}]
            if missing and time.monotonic() >= deadline:
                raise TimeoutError(f"{', '.join(missing)}: no '{name}' with digest {digest} within {timeout_s} s")
            if missing:
                await asyncio.sleep(interval_s)


async def pause_async(
    name: str, mode: str = "wait", *, servers: Sequence[str], key: str | None = None, timeout_s: float = 300.0
) -> None:
    """Have every server hold new requests for a name, and return once none of the name's requests runs anywhere.

    Args:
        name: the model name of requests; all other names run on.
        mode: `wait`, `abort` or `keep`: what becomes of requests that came before.
        servers: base URLs.
        key: of an administrator.
        timeout_s: of each call; a server that did not answer in time holds new requests all the same.

    Raises:
        CallFailed: a server did not pause, or was resumed meanwhile; the other servers stay paused until `resume`.
    """
    await _post_all(name, f"pause?mode={quote(mode)}", servers, key, timeout_s)


async def resume_async(name: str, *, servers: Sequence[str], key: str | None = None, timeout_s: float = 300.0) -> None:
    """Have every server go on with requests for a paused name; a server that is not paused does nothing.

    Raises:
        CallFailed: a server did not answer, or does not serve the name; all others have resumed.
    """
    await _post_all(name, "resume", servers, key, timeout_s)


async def _post_all(name: str, verb: str, servers: Sequence[str], key: str | None, timeout_s: float) -> None:
    addresses = _addresses(servers)
    async with _client(addresses, key, timeout_s) as client:
        heard = await _heard(addresses, [client.post(f"{_url(it, name)}/{verb}") for it in addresses])
    errors = {it: text for it in heard if (text := error_of(answers_of(heard[it]), "status")) is not None}
    if errors:
        raise CallFailed(errors)


async def _heard(addresses: Sequence[str], calls: Sequence[Coroutine[Any, Any, httpx.Response]]) -> dict[str, Heard]:
    return dict(zip(addresses, await asyncio.gather(*calls, return_exceptions=True), strict=True))


def _push_errors(attempts: Mapping[str, Attempt]) -> dict[str, str]:
    errors = {server: it.error for server, it in attempts.items() if it.error is not None}
    if errors or len(_pushed(attempts)) == 1:
        return errors
    # All servers got the same bytes, and a digest is of bytes.
    return {server: f"serves {', '.join(sorted(it.digests))}, others not" for server, it in attempts.items()}


def _pushed(attempts: Mapping[str, Attempt]) -> set[str]:
    return set().union(*(it.digests for it in attempts.values()))


async def _undo(attempts: Mapping[str, Attempt]) -> list[str]:
    """Undo a push where a server took it, unless another push came since; return servers where that is not sure."""
    undoing = asyncio.gather(*(it.undo(_pushed(attempts)) for it in attempts.values()))
    try:
        are_undone = await asyncio.shield(undoing)
    except asyncio.CancelledError:
        await undoing
        raise
    return [server for server, is_undone in zip(attempts, are_undone, strict=True) if not is_undone]


def _addresses(servers: Sequence[str]) -> list[str]:
    # Two spellings of one address would supersede each other's push.
    spelt = {_url(it, ""): it for it in ([servers] if isinstance(servers, str) else servers)}
    addresses = list(spelt.values())
    if not addresses:
        raise ValueError("servers: empty; name the base URL of one server or more")
    if any("@" in it for it in addresses):
        raise ValueError("servers: a login in an address, which errors and logs would show; give the key as `key`")
    return addresses


def is_sendable(key: str) -> bool:
    """Whether a header can have a key; errors of HTTP libraries show a key that none can have."""
    return key.isascii() and key.isprintable() and key == key.strip()


def is_here(url: str) -> bool:
    """Whether a server's URL names this machine: then no proxy of the environment is asked, nor has to be usable."""
    return _HERE.match(url) is not None


def _client(servers: Sequence[str], key: str | None, timeout_s: float) -> httpx.AsyncClient:
    if key is not None and not is_sendable(key):
        raise ValueError("key: characters that no header can have, such as a line feed at the end")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # Reading certificates takes as long as sending a small adapter, and plain HTTP needs no certificates.
    needs_certificates = any(server.startswith("https:") for server in servers)
    verify = httpx.create_ssl_context() if needs_certificates else False
    needs_proxies = not all(map(is_here, servers))
    return httpx.AsyncClient(headers=headers, timeout=timeout_s, verify=verify, mounts=_DIRECT, trust_env=needs_proxies)


def _url(server: str, name: str) -> str:
    return f"{server.rstrip('/').removesuffix('/v1')}/v1/loras/{quote(name)}"
