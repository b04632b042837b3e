"""A client of the admin API for trainers: push an adapter to one or several servers, all or none; no vLLM, no torch.

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
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from lora_plugins.client_body import body_of

_T = TypeVar("_T")


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
        not_rolled_back: servers that serve the pushed version nevertheless, as their rollback failed.
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
    return _run(push_async(name, adapter, config, **options))


def wait_served(name: str, digest: str, servers: Sequence[str], *, timeout_s: float = 60.0, **options: Any) -> None:
    """Wait until each server serves `digest` under the name.

    Raises:
        TimeoutError: a server does not within `timeout_s`.
    """
    _run(wait_served_async(name, digest, servers, timeout_s=timeout_s, **options))


def pause(name: str, mode: str = "wait", **options: Any) -> None:
    """Call `pause_async`, for callers without an event loop."""
    _run(pause_async(name, mode, **options))


def resume(name: str, **options: Any) -> None:
    """Call `resume_async`, for callers without an event loop."""
    _run(resume_async(name, **options))


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
    timeout_s: float = 300.0,
) -> Pushed:
    """Have every server serve `adapter` as the next version of `name`.

    Args:
        name: the model name of requests.
        adapter: a PEFT directory, or a mapping from tensor names to tensors, which needs `config`.
        config: the content of adapter_config.json.
        servers: base URLs.
        key: of an administrator.
        if_match: the digest that each server must serve now, `*` for any.
        mode: `finish`, or `inflight`: running requests go on with the new version.
        keep: how many earlier versions stay for `name@digest`.
        timeout_s: of each call.

    Raises:
        PushFailed: a server did not take the version; the others were rolled back to their earlier versions.
    """
    body, content_headers = body_of(adapter, config)
    query = {"mode": mode, **({} if keep is None else {"keep": str(keep)})}
    headers = content_headers if if_match is None else {**content_headers, "If-Match": if_match}
    async with _client(servers, key, timeout_s) as client:
        calls = [client.put(_url(it, name), content=body, headers=headers, params=query) for it in servers]
        # Exceptions are answers too: every server must be heard before a rollback, or a late server keeps the version.
        answers = dict(zip(servers, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        errors = {server: text for server, answer in answers.items() if (text := _error(answer)) is not None}
        if errors:
            taken = {server: answer for server, answer in answers.items() if isinstance(answer, httpx.Response)}
            raise PushFailed(
                errors, await _roll_back(client, name, {it: taken[it] for it in taken if it not in errors})
            )
    done = {server: answer.json() for server, answer in answers.items() if isinstance(answer, httpx.Response)}
    # All servers got the same bytes, and a digest is of bytes: exactly one digest comes back.
    (digest,) = {one["digest"] for one in done.values()}
    previous = {server: one["previous_digest"] for server, one in done.items()}
    return Pushed(digest, previous, {server: one["timings"] for server, one in done.items()})


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
    deadline, missing = time.monotonic() + timeout_s, list(servers)
    async with _client(servers, key, timeout_s) as client:
        while missing:
            calls = [client.get(_url(server, name)) for server in missing]
            answers = zip(missing, await asyncio.gather(*calls, return_exceptions=True), strict=True)
            missing = [server for server, answer in answers if _digest(answer) != digest]
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
    async with _client(servers, key, timeout_s) as client:
        calls = [client.post(f"{_url(it, name)}/{verb}") for it in servers]
        answers = zip(servers, await asyncio.gather(*calls, return_exceptions=True), strict=True)
    errors = {server: text for server, answer in answers if (text := _error(answer)) is not None}
    if errors:
        raise CallFailed(errors)


async def _roll_back(client: httpx.AsyncClient, name: str, taken: Mapping[str, httpx.Response]) -> list[str]:
    """Undo a push where a server took it, unless another push came since; return servers whose rollback failed."""
    failed = []
    for server, answer in taken.items():
        done = answer.json()
        headers = {"If-Match": done["digest"]}
        if not done["swapped"] and done["previous_digest"] is not None:
            continue  # the server had served these bytes before
        if done["previous_digest"] is None:
            undone = await client.delete(_url(server, name), headers=headers)
        else:
            body = {"digest": done["previous_digest"]}
            undone = await client.post(f"{_url(server, name)}/rollback", json=body, headers=headers)
        # 412: another push came since, and `If-Match` kept this rollback from undoing it.
        if undone.status_code not in (200, 412):
            failed.append(server)
    return failed


def _client(servers: Sequence[str], key: str | None, timeout_s: float) -> httpx.AsyncClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # Reading certificates takes as long as sending a small adapter, and plain HTTP needs no certificates.
    needs_certificates = any(server.startswith("https:") for server in servers)
    return httpx.AsyncClient(headers=headers, timeout=timeout_s, verify=needs_certificates)


def _url(server: str, name: str) -> str:
    return f"{server.rstrip('/')}/v1/loras/{quote(name)}"


def _error(answer: httpx.Response | BaseException) -> str | None:
    if isinstance(answer, BaseException):
        return f"{type(answer).__name__}: {answer}"
    # A pause that another client's resume has ended is answered with 200, and did not last.
    is_done = answer.status_code == 200 and answer.json().get("status") != "resumed"
    return None if is_done else f"{answer.status_code} {answer.text}"


def _digest(answer: httpx.Response | BaseException) -> str | None:
    if isinstance(answer, BaseException) or answer.status_code != 200:
        return None
    found: str | None = answer.json().get("digest")
    return found


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(work)
