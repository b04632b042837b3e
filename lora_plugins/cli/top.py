"""`top`: a running server's adapters, read off `GET /v1/loras` of its admin API."""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from lora_plugins.api.models import AdapterList, AdapterView
from lora_plugins.cli.amounts import ago, number, size
from lora_plugins.cli.exits import Exit, UsageProblem
from lora_plugins.cli.output import Json, Output, printable, table
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable

_PATH = "/v1/loras"
_MAX_BYTES = 64 << 20
_HEADS = ("name", "state", "running", "held", "rank", "size", "tiers", "used", "version", "")
_NARROW_HEADS = ("name", "state", "running", "held", "size", "")
_WIDE = 90  # columns, for all of them to be readable


def top(
    *,
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://localhost:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=["LORA_PLUGINS_ADMIN_KEY", "VLLM_API_KEY"],
            show_envvar=True,
            help="A key that may use the admin API.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 2.0,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one answer.")] = 5.0,
    as_json: Json = False,
) -> Exit:
    """Watch the adapters of a server that runs lora_admin."""
    # On a terminal, a server that no longer answers is reported and asked again; in a pipe that is the end.
    output = Output(as_json=as_json)
    listed = read_adapters(url, api_key, timeout_s)
    if once:
        output.json(listed.model_dump(mode="json"))
        output.show(_view(listed, url, None, output.console.width))
        return Exit.OK
    with contextlib.suppress(KeyboardInterrupt):  # how one stops looking
        _watch(output, url, api_key, listed, interval_s=interval_s, timeout_s=timeout_s)
    return Exit.OK


def _watch(
    output: Output, url: str, api_key: str | None, listed: AdapterList, *, interval_s: float, timeout_s: float
) -> None:
    if output.as_json or not output.console.is_terminal:
        while True:
            output.json(listed.model_dump(mode="json"), compact=True)
            output.show(_view(listed, url, None, output.console.width))
            output.line()
            time.sleep(interval_s)
            listed = read_adapters(url, api_key, timeout_s)
    with Live(
        _view(listed, url, None, output.console.width),
        console=output.console,
        auto_refresh=False,
        screen=True,
    ) as live:
        while True:
            time.sleep(interval_s)
            outage: LoRAPluginsError | None = None
            try:
                listed = read_adapters(url, api_key, timeout_s)
            except SourceUnavailable as error:
                outage = error
            live.update(_view(listed, url, outage, output.console.width), refresh=True)


def read_adapters(url: str, api_key: str | None, timeout_s: float) -> AdapterList:
    """What the server's admin API lists.

    Raises:
        UsageProblem: `url` is no address of a server.
        SourceUnavailable: the server does not answer, denies, or has no admin API.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise UsageProblem(f"--url {url}: not http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageProblem(f"--url {url}: not http://host:port")
    address = url.rstrip("/").removesuffix("/v1") + _PATH
    request = urllib.request.Request(address, headers={"Accept": "application/json"})  # noqa: S310 - checked above
    if api_key:
        request.add_unredirected_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - checked above
            body = answer.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise _refused(url, error.code) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise SourceUnavailable(
            f"no answer from {url} ({getattr(reason, 'strerror', None) or reason or type(reason).__name__})",
            expected="a running vLLM server",
            remedy="check --url, and that the server runs",
        ) from None
    try:
        return AdapterList.model_validate_json(body)
    except ValueError:
        raise SourceUnavailable(
            f"an answer of {url}{_PATH} that is no list of adapters",
            expected="the admin API of lora-plugins",
            remedy="check --url, and that server and command line are of one version",
        ) from None


def _refused(url: str, status: int) -> SourceUnavailable:
    if status in (401, 403):
        return SourceUnavailable(
            f"a server at {url} that denies access (HTTP {status})",
            expected="a key that it accepts for its admin API",
            remedy="give --api-key, or set LORA_PLUGINS_ADMIN_KEY or VLLM_API_KEY; or ask on the server's machine",
        )
    if status == 404:
        return SourceUnavailable(
            f"a server at {url} without {_PATH}",
            expected="one with the admin API, or a key that may use it",
            remedy="name lora_admin and lora_lru_manager in the server's VLLM_PLUGINS",
        )
    return SourceUnavailable(
        f"a server at {url} that answers HTTP {status}", expected="HTTP 200", remedy="look at the server's log"
    )


def _view(listed: AdapterList, url: str, outage: LoRAPluginsError | None, width: int) -> Group:
    heads = _HEADS if width >= _WIDE else _NARROW_HEADS
    adapters = sorted(
        listed.loras, key=lambda item: (-item.requests_in_flight, -item.requests_held, -(item.last_used_at or 0))
    )
    states = Counter(str(item.state) for item in adapters)
    running = sum(item.requests_in_flight for item in adapters)
    held = sum(item.requests_held for item in adapters)
    head = f"{url}: {number(listed.count, 'adapter')}, {number(running, 'request')} in flight, {held} held" + "".join(
        f", {count} {state}" for state, count in sorted(states.items())
    )
    rows = [dict(zip(_HEADS, _row(item), strict=True)) for item in adapters]
    shown = table(heads, [[row[head] for head in heads] for row in rows], right=("running", "held", "rank", "size"))
    last = [] if outage is None else [Text(printable(str(outage)), style="bold red")]
    return Group(Text(printable(head)), *([shown] if adapters else []), *last)


def _row(item: AdapterView) -> tuple[str, ...]:
    marks = ["pinned"] if item.pinned else []
    if item.pinned_digest:
        marks.append(f"stays at {item.pinned_digest[:12]}")
    if item.last_error is not None:
        marks.append(item.last_error.message)
    return (
        item.lora_name,
        str(item.state),
        str(item.requests_in_flight),
        str(item.requests_held),
        "" if item.rank is None else str(item.rank),
        size(item.size_bytes),
        " ".join(item.tiers),
        ago(item.last_used_at),
        (item.digest or item.path or "")[:12],
        "; ".join(marks),
    )
