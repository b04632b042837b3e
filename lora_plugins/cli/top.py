"""`top`: a running server's adapters, read off `GET /v1/loras` of its admin API."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from lora_plugins.api.models import AdapterList, AdapterView
from lora_plugins.cli.admin_client import DEFAULT_URL, AdminClient, ServerUrl
from lora_plugins.cli.amounts import ago, number, size
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Json, Output, printable, table
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable

_HEADS = ("name", "state", "running", "held", "rank", "size", "tiers", "used", "version", "")
_NARROW_HEADS = ("name", "state", "running", "held", "size", "")
_WIDE = 90  # columns, for all of them to be readable


def top(
    *,
    url: ServerUrl = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 2.0,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one answer.")] = 5.0,
    as_json: Json = False,
) -> Exit:
    """Watch the adapters of a server that runs lora_admin."""
    # On a terminal, a server that no longer answers is reported and asked again; in a pipe that is the end.
    output, client = Output(as_json=as_json), AdminClient(url, timeout_s)
    listed = client.adapters()
    if once:
        output.json(listed.model_dump(mode="json"))
        output.show(_view(listed, url, None, output.console.width))
        return Exit.OK
    with contextlib.suppress(KeyboardInterrupt):  # how one stops looking
        _watch(output, client, listed, interval_s)
    return Exit.OK


def _watch(output: Output, client: AdminClient, listed: AdapterList, interval_s: float) -> None:
    url = client.url
    if output.as_json or not output.console.is_terminal:
        while True:
            output.json(listed.model_dump(mode="json"), compact=True)
            output.show(_view(listed, url, None, output.console.width))
            output.line()
            time.sleep(interval_s)
            listed = client.adapters()
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
                listed = client.adapters()
            except SourceUnavailable as error:
                outage = error
            live.update(_view(listed, url, outage, output.console.width), refresh=True)


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
