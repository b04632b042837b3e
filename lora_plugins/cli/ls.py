"""`ls`: the adapters in this host's store, in the sources (`--remote`), or of a running server (`--server`).

Runs in the command's process, and changes nothing. Out: a row for each adapter, as a table and as JSON.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from lora_plugins.api.models import AdapterList, AdapterView
from lora_plugins.cli import Exit, UsageProblem, exit_of
from lora_plugins.cli.output import Output, Result, ago, error_fields, line, number, short, size, table, table_above
from lora_plugins.cli.server_client import DEFAULT_URL, AdminClient, ServerUrl, Timeout
from lora_plugins.cli.sources import list_names, require_sources, sources_of_environment
from lora_plugins.cli.store_view import StoreView
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import Settings

_WIDE = 90  # characters of a terminal, for all columns to be readable; a narrower terminal goes without some
_WIDE_ONLY = ("rank", "tiers", "used", "version")


def ls(
    output: Output,
    *,
    remote: Annotated[bool, typer.Option("--remote", help="List what the sources have, if they can say.")] = False,
    base_model: Annotated[
        str, typer.Option("--base-model", help="With --remote: what {base_model_name} stands for in S3_PATH_TEMPLATE.")
    ] = "",
    server: Annotated[bool, typer.Option("--server", help="List what a server that runs lora_admin serves.")] = False,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 5.0,
) -> Result:
    """List what the store, the sources or a server has.

    Examples:
        ls --json
        ls --remote
        ls --server --url http://gpu-7:8000
    """
    if remote and server:
        raise UsageProblem("--remote is for sources, and --server is for a server")
    if server:
        return _served(AdminClient(url, timeout_s).adapters(), url, output.console.width)
    view = StoreView(Settings.from_env())
    return _remote(view, base_model) if remote else _stored(view)


def _stored(view: StoreView) -> Result:
    rows = [view.row(entry) for entry in reversed(view.entries())]
    total_bytes, max_bytes = sum(row["size_bytes"] for row in rows), view.settings.store_max_bytes
    fields = {"store": str(view.layout.root), "adapters": rows, "count": len(rows)}
    fields |= {"size_bytes": total_bytes, "max_bytes": max_bytes}
    columns: Mapping[str, Callable[[dict[str, Any]], str]] = {
        "digest": lambda row: short(row["digest"]),
        "size": lambda row: size(row["size_bytes"]),
        "used": lambda row: ago(row["used_at"]),
        "leased": lambda row: f"by {row['leases']}" if row["leases"] else "",
        "uri": lambda row: (row["uri"] or "?") + (" (damaged)" if row["damaged"] else ""),
    }
    shown = table_above(tuple(columns), [[cell(row) for cell in columns.values()] for row in rows])
    budget = "" if max_bytes is None else f" of {size(max_bytes)}"
    end = line(f"{number(len(rows), 'adapter')}, {size(total_bytes)}{budget}, in {view.layout.root}")
    return Result(fields, [*shown, end])


def _remote(view: StoreView, base_model: str) -> Result:
    sources = sources_of_environment(view.settings)
    require_sources(sources)
    stored = defaultdict[str | None, list[str]](list)
    for entry in view.entries():
        stored[view.name_of(entry)].append(entry.digest)
    adapters: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    ends, code = [], Exit.OK
    for source, listing in zip(sources, asyncio.run(list_names(sources, base_model)), strict=True):
        answer: dict[str, Any] = {"source": source.label, "place": str(source), "count": 0, "not_listed": []}
        answers.append(answer)
        if isinstance(listing, LoRAPluginsError):
            code = max(code, exit_of(listing))
            answer["error"] = error_fields(listing)
            why = [line(f"  not listed: {listing}", "bold red")]
        else:
            answer["count"], answer["not_listed"] = len(listing.names), list(listing.gaps)
            adapters += ({"name": name, "source": source.label, "stored": stored[name]} for name in listing.names)
            why = [line(f"  not listed: {gap}") for gap in listing.gaps]
        ends += [line(f"{source}: {number(answer['count'], 'adapter')}"), *why]
    cells = [(row["name"], row["source"], " ".join(short(digest) for digest in row["stored"])) for row in adapters]
    shown = table_above(("name", "source", "in the store"), cells)
    return Result({"adapters": adapters, "count": len(adapters), "sources": answers}, [*shown, *ends], code)


def _served(listed: AdapterList, url: str, width: int) -> Result:
    adapters = sorted(
        listed.loras, key=lambda item: (-item.requests_in_flight, -item.requests_held, -(item.last_used_at or 0))
    )
    states = Counter(str(item.state) for item in adapters)
    parts = [
        f"{url}: {number(listed.count, 'adapter')}",
        f"{number(sum(item.requests_in_flight for item in adapters), 'request')} in flight",
        f"{sum(item.requests_held for item in adapters)} held",
        *(f"{count} {state}" for state, count in sorted(states.items())),
    ]
    heads = [head for head in _COLUMNS if width >= _WIDE or head not in _WIDE_ONLY]
    rows = [[_COLUMNS[head](item) for head in heads] for item in adapters]
    shown = [table(heads, rows)] if rows else []
    return Result(listed.model_dump(mode="json", exclude={"next"}), [line(", ".join(parts)), *shown])


def _marks(item: AdapterView) -> str:
    marks = ["pinned"] if item.pinned else []
    if item.pinned_digest:
        marks.append(f"stays at {short(item.pinned_digest)}")
    if item.last_error is not None:
        marks.append(item.last_error.message)
    return "; ".join(marks)


_COLUMNS: Mapping[str, Callable[[AdapterView], str]] = {
    "name": lambda item: item.lora_name,
    "state": lambda item: str(item.state),
    "running": lambda item: str(item.requests_in_flight),
    "held": lambda item: str(item.requests_held),
    "rank": lambda item: "" if item.rank is None else str(item.rank),
    "size": lambda item: size(item.size_bytes),
    "tiers": lambda item: " ".join(item.tiers),
    "used": lambda item: ago(item.last_used_at),
    "version": lambda item: short(item.digest or item.path),
    "": _marks,
}
