"""`ls`: what is in the store."""

from __future__ import annotations

from lora_plugins.cli.amounts import ago, number, size
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Json, Output, Quiet
from lora_plugins.cli.stored import SHOWN_CHARACTERS, StoreView
from lora_plugins.settings import Settings


def ls(*, quiet: Quiet = False, as_json: Json = False) -> Exit:
    """List what is in the store."""
    output, settings = Output(as_json=as_json, quiet=quiet), Settings.from_env()
    view = StoreView(settings)
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
