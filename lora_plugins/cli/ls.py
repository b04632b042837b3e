"""`ls`: what is in the store, or with `--remote` what the sources have."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Annotated, Any

import typer

from lora_plugins.cli.amounts import ago, number, size
from lora_plugins.cli.exits import Exit, exit_of
from lora_plugins.cli.output import Json, Output, Quiet, error_fields
from lora_plugins.cli.sources import list_names, require_sources, sources_of_environment
from lora_plugins.cli.stored import SHOWN_CHARACTERS, StoreView
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import Settings


def ls(
    *,
    remote: Annotated[
        bool, typer.Option("--remote", help="List what the sources have, as far as they can say.")
    ] = False,
    base_model: Annotated[
        str, typer.Option("--base-model", help="With --remote: what {base_model_name} stands for in S3_PATH_TEMPLATE.")
    ] = "",
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """List what is in the store, or what the sources have."""
    output, settings = Output(as_json=as_json, quiet=quiet), Settings.from_env()
    view = StoreView(settings)
    if remote:
        return _remote(output, settings, view, base_model)
    rows = [view.row(entry) for entry in reversed(view.entries())]
    total_bytes = sum(row["size_bytes"] for row in rows)
    output.json(
        {
            "store": str(view.layout.root),
            "adapters": rows,
            "count": len(rows),
            "size_bytes": total_bytes,
            "max_bytes": settings.store_max_bytes,
        }
    )
    if rows:
        output.table(
            ("digest", "size", "used", "leased", "uri"),
            [
                (
                    row["digest"][:SHOWN_CHARACTERS],
                    size(row["size_bytes"]),
                    ago(row["used_at"]),
                    f"by {row['leases']}" if row["leases"] else "",
                    (row["uri"] or "?") + (" (damaged)" if row["damaged"] else ""),
                )
                for row in rows
            ],
            right=("size",),
        )
        output.line()
    budget = "" if settings.store_max_bytes is None else f" of {size(settings.store_max_bytes)}"
    output.line(f"{number(len(rows), 'adapter')}, {size(total_bytes)}{budget}, in {view.layout.root}")
    return Exit.OK


def _remote(output: Output, settings: Settings, view: StoreView, base_model: str) -> Exit:
    sources = sources_of_environment(settings)
    require_sources(sources)
    stored: defaultdict[str, list[str]] = defaultdict(list)
    for entry in view.entries():
        name = None if entry.manifest is None else view.name_of(entry.manifest.uri)
        if name is not None:
            stored[name].append(entry.digest)
    adapters: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    codes = [Exit.OK]
    for source, listing in zip(sources, asyncio.run(list_names(sources, base_model)), strict=True):
        answer: dict[str, Any] = {"source": source.label, "place": str(source), "count": 0, "not_listed": []}
        answers.append(answer)
        if isinstance(listing, LoRAPluginsError):
            codes.append(exit_of(listing))
            answer["error"] = error_fields(listing)
            continue
        answer["count"], answer["not_listed"] = len(listing.names), list(listing.gaps)
        adapters += ({"name": name, "source": source.label, "stored": stored[name]} for name in listing.names)
    output.json({"adapters": adapters, "count": len(adapters), "sources": answers})
    if adapters:
        output.table(
            ("name", "source", "in the store"),
            [
                (row["name"], row["source"], " ".join(digest[:SHOWN_CHARACTERS] for digest in row["stored"]))
                for row in adapters
            ],
        )
        output.line()
    for answer in answers:
        output.line(f"{answer['place']}: {number(answer['count'], 'adapter')}")
        for gap in answer["not_listed"]:
            output.line(f"  not listed: {gap}")
        if "error" in answer:
            output.line(f"  not listed: {answer['error']['message']}", style="bold red")
    return max(codes)
