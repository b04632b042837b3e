"""`rm`: remove adapters from the store, but for those that a running process has leased."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lora_plugins.cli.amounts import number, size
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Json, Output, Quiet, error_fields
from lora_plugins.cli.several import NamesFile, failure, wanted
from lora_plugins.cli.stored import SHOWN_CHARACTERS, StoreView
from lora_plugins.settings import Settings


def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names, patterns in quotes, URIs, or beginnings of digests: all versions of each."),
    ] = None,
    *,
    file: NamesFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Remove adapters from the store, unless they are in use."""
    output, view = Output(as_json=as_json, quiet=quiet), StoreView(Settings.from_env())
    found, errors = view.select_all([one.name for one in wanted(names, file)])
    codes = [failure(output, error) for error in errors]
    rows: list[dict[str, Any]] = []
    for entry in found:
        row = view.row(entry)
        holders = [view.processes.describe(name) for name in view.leases.holders(entry.digest)]
        is_gone = not holders if dry_run else view.store.remove(entry.digest)
        rows.append({**row, "removed": is_gone, "holders": [] if is_gone else holders})
        if not is_gone:
            codes.append(Exit.NO_ROOM)
    removed_bytes = sum(row["size_bytes"] for row in rows if row["removed"])
    output.json(
        {
            "store": str(view.layout.root),
            "dry_run": dry_run,
            "adapters": rows,
            "count": len(rows),
            "removed_bytes": removed_bytes,
            "errors": [error_fields(error) for error in errors],
        }
    )
    done = "would be removed" if dry_run else "removed"
    if rows:
        output.table(
            ("digest", "size", "", "uri"),
            [
                (
                    row["digest"][:SHOWN_CHARACTERS],
                    size(row["size_bytes"]),
                    done if row["removed"] else f"stays: leased by {', '.join(row['holders']) or 'another process'}",
                    row["uri"] or "?",
                )
                for row in rows
            ],
            right=("size",),
        )
        output.line()
    removed = sum(row["removed"] for row in rows)
    output.line(f"{number(removed, 'adapter')} {done}, {size(removed_bytes)}")
    return max(codes, default=Exit.OK)
