"""`gc`: remove what was used longest ago and is not leased until the rest fits, and what was quarantined."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lora_plugins.cli.amounts import ago, size
from lora_plugins.cli.exits import Exit, UsageProblem
from lora_plugins.cli.output import Json, Output, Quiet
from lora_plugins.cli.stored import SHOWN_CHARACTERS, StoreView
from lora_plugins.settings import Settings
from lora_plugins.store.eviction import Entry, discard_quarantined, evict, quarantined
from lora_plugins.variables import SIZE_EXPECTED, bytes_of


def gc(
    *,
    max_bytes: Annotated[
        str | None, typer.Option(help="The budget to reach, such as 20Gi; LORA_PLUGINS_STORE_MAX_BYTES without it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Remove what was used longest ago, until the rest fits.

    Adapters that a running server has leased stay.
    """
    output, settings = Output(as_json=as_json, quiet=quiet), Settings.from_env()
    budget = _budget(settings, max_bytes)
    view = StoreView(settings)
    rows: dict[str, dict[str, Any]] = {}

    def remove(entry: Entry) -> bool:
        rows[entry.digest] = row = view.row(entry)
        return not row["leases"] if dry_run else view.store.remove(entry.digest)

    known = view.entries()
    damaged = quarantined(view.layout) if view.layout.folder("quarantine").is_dir() else []
    done = evict(known, budget, remove)
    if damaged and not dry_run:
        for entry in damaged:
            discard_quarantined(view.store.layout, entry.digest)
    before_bytes = sum(entry.size_bytes for entry in known)
    fits = done.left_bytes <= budget
    output.json(
        {
            "store": str(view.layout.root),
            "dry_run": dry_run,
            "max_bytes": budget,
            "before_bytes": before_bytes,
            "after_bytes": done.left_bytes,
            "fits": fits,
            "removed": [rows[entry.digest] for entry in done.removed],
            "leased": [rows[entry.digest] for entry in done.leased],
            "quarantine": [{"name": entry.digest, "size_bytes": entry.size_bytes} for entry in damaged],
        }
    )
    removed = "would be removed" if dry_run else "removed"
    verdicts = [(entry, ago(entry.used_at), removed) for entry in done.removed]
    verdicts += [(entry, ago(entry.used_at), "stays: leased") for entry in done.leased]
    verdicts += [(entry, "", f"damaged, {removed}") for entry in damaged]
    if verdicts:
        output.table(
            ("digest", "size", "used", ""),
            [(entry.digest[:SHOWN_CHARACTERS], size(entry.size_bytes), used, said) for entry, used, said in verdicts],
            right=("size",),
        )
        output.line()
    output.line(f"{size(before_bytes)} before, {size(done.left_bytes)} after, budget {size(budget)}")
    if not fits:
        output.line("what would still have to go is leased by running servers", style="bold red")
    return Exit.OK if fits else Exit.NO_ROOM


def _budget(settings: Settings, text: str | None) -> int:
    budget = settings.store_max_bytes if text is None else 0 if text.strip() == "0" else bytes_of(text)
    if budget is not None:
        return budget
    if text is None:
        raise UsageProblem("gc needs a budget: give --max-bytes, or set LORA_PLUGINS_STORE_MAX_BYTES")
    raise UsageProblem(f"--max-bytes {text}: expected {SIZE_EXPECTED}, or 0")
