"""`ls`, `verify` and `gc`: what lies in the store of the settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_plugins.cli.amounts import ago, number, size
from lora_plugins.cli.exits import Exit, UsageProblem
from lora_plugins.cli.output import Output
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, InvalidSettings
from lora_plugins.settings import Settings
from lora_plugins.store.collection import discard_quarantined, plan, quarantined
from lora_plugins.store.eviction import Entry, entries
from lora_plugins.store.layout import Layout
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.opening import open_store
from lora_plugins.store.processes import Processes

_SHORT = 12
_SHORTEST = 4


def ls(output: Output, settings: Settings) -> Exit:
    """List the adapters, the one used last first; nothing is written, so that a store may be read-only.

    Raises:
        InvalidSettings: the store cannot be read.
    """
    layout = Layout(settings.store_dir)
    known = _entries(layout)
    leases = _leases(layout)
    rows = [_row(layout, entry, leases) for entry in reversed(known)]
    total_bytes = sum(entry.size_bytes for entry in known)
    output.json(
        {
            "store": str(layout.root),
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
                    row["digest"][:_SHORT],
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
    output.line(f"{number(len(rows), 'adapter')}, {size(total_bytes)}{budget}, in {layout.root}")
    return Exit.OK


def verify(output: Output, settings: Settings, digests: Sequence[str]) -> Exit:
    """Hash adapters again, all of them where none is named; damaged ones are put aside, to be fetched anew.

    Raises:
        AdapterNotFound: no adapter has a digest that begins so.
        InvalidSettings: the store cannot be written.
    """
    layout = Layout(settings.store_dir)
    chosen = [find_digest(layout, prefix) for prefix in digests] or [entry.digest for entry in _entries(layout)]
    verdicts = []
    if chosen:
        store = open_store(settings)
        for digest in chosen:
            output.progress(f"hashing {digest[:_SHORT]}")
            whole = store.verify(digest)
            verdicts.append({"digest": digest, "whole": whole, "put_aside": not layout.adapter(digest).exists()})
    damaged = [item for item in verdicts if not item["whole"]]
    output.json({"store": str(layout.root), "adapters": verdicts, "count": len(verdicts), "damaged": len(damaged)})
    output.table(
        ("digest", "verdict"),
        [(str(item["digest"])[:_SHORT], _verdict(item)) for item in verdicts],
    )
    output.line(f"{number(len(verdicts), 'adapter')}, {len(damaged)} damaged", style="bold red" if damaged else "")
    return Exit.WRONG if damaged else Exit.OK


def _verdict(item: Mapping[str, object]) -> str:
    if item["whole"]:
        return "whole"
    return "damaged, put aside" if item["put_aside"] else "damaged, and in use: replaced once it is fetched anew"


def gc(output: Output, settings: Settings, max_bytes: int | None, *, dry_run: bool) -> Exit:
    """Remove what was used longest ago and is not leased until the rest fits, and what was put aside as damaged.

    Raises:
        UsageProblem: there is no budget to reach.
        InvalidSettings: the store cannot be read or written.
    """
    budget = settings.store_max_bytes if max_bytes is None else max_bytes
    if budget is None:
        raise UsageProblem("gc needs a budget: give --max-bytes, or set LORA_PLUGINS_STORE_MAX_BYTES")
    layout = Layout(settings.store_dir)
    leases = _leases(layout)
    chosen = plan(_entries(layout), lambda digest: bool(leases(digest)), budget)
    aside = quarantined(layout) if layout.folder("quarantine").is_dir() else []
    removed = list(chosen.remove)
    rows_of = {entry.digest: _row(layout, entry, leases) for entry in (*chosen.remove, *chosen.leased)}
    if not dry_run and (removed or aside):
        store = open_store(settings)
        removed = [entry for entry in removed if store.remove(entry.digest)]
        for entry in aside:
            discard_quarantined(layout, entry.digest)
    after_bytes = chosen.before_bytes - sum(entry.size_bytes for entry in removed)
    fits = after_bytes <= budget
    output.json(
        {
            "store": str(layout.root),
            "dry_run": dry_run,
            "max_bytes": budget,
            "before_bytes": chosen.before_bytes,
            "after_bytes": after_bytes,
            "fits": fits,
            "removed": [rows_of[entry.digest] for entry in removed],
            "leased": [rows_of[entry.digest] for entry in chosen.leased],
            "quarantine": [{"name": entry.digest, "size_bytes": entry.size_bytes} for entry in aside],
        }
    )
    said = "would be removed" if dry_run else "removed"
    rows = [(entry.digest[:_SHORT], size(entry.size_bytes), ago(entry.used_at), said) for entry in removed]
    rows += [
        (entry.digest[:_SHORT], size(entry.size_bytes), ago(entry.used_at), "stays: leased") for entry in chosen.leased
    ]
    rows += [(entry.digest[:_SHORT], size(entry.size_bytes), "", f"damaged, {said}") for entry in aside]
    if rows:
        output.table(("digest", "size", "used", ""), rows, right=("size",))
        output.line()
    output.line(f"{size(chosen.before_bytes)} before, {size(after_bytes)} after, budget {size(budget)}")
    if not fits:
        output.line("what would still have to go is leased by running servers", style="bold red")
    return Exit.OK if fits else Exit.NO_ROOM


def find_digest(layout: Layout, prefix: str) -> str:
    """The one published adapter whose digest begins so.

    Raises:
        AdapterNotFound: there is none.
        UsageProblem: there are several, or the prefix is too short.
    """
    if len(prefix) < _SHORTEST or not set(prefix) <= set("0123456789abcdef"):
        raise UsageProblem(f"'{prefix}' is no digest: {_SHORTEST} to 64 of 0-9 and a-f")
    found = [entry.digest for entry in _entries(layout) if entry.digest.startswith(prefix)]
    if not found:
        raise AdapterNotFound(
            "no such adapter in the store",
            expected=f"a digest in {layout.root} that begins with {prefix}",
            remedy="'lora-plugins ls' shows what is there",
        )
    if len(found) > 1:
        raise UsageProblem(f"'{prefix}' is the beginning of {len(found)} digests; give more of it")
    return found[0]


def _entries(layout: Layout) -> list[Entry]:
    """What is published; nothing where the store has never been made."""
    if not layout.root.exists():
        return []
    try:
        return entries(layout)
    except OSError as error:
        raise InvalidSettings(
            f"a store below {layout.root} that answers '{error.strerror or type(error).__name__}'",
            expected="a directory that can be read",
            remedy="set LORA_PLUGINS_STORE_DIR, or run as the server's user",
        ) from error


def _leases(layout: Layout) -> Callable[[str], int]:
    """How many living processes lease an adapter; one that cannot be judged counts as living."""
    processes = Processes(layout.folder("processes"))

    def count(digest: str) -> int:
        living = 0
        try:
            names = os.listdir(layout.folder("leases") / digest)
        except OSError:
            return 0
        for name in names:
            try:
                living += processes.is_alive(name)
            except OSError:
                living += 1
        return living

    return count


def _row(layout: Layout, entry: Entry, leases: Callable[[str], int]) -> dict[str, Any]:
    try:
        manifest = Manifest.read(layout.adapter(entry.digest))
    except InvalidAdapter:
        manifest = None
    return {
        "digest": entry.digest,
        "uri": manifest.uri if manifest else None,
        "version": manifest.version if manifest else None,
        "size_bytes": entry.size_bytes,
        "fetched_at": manifest.fetched_at if manifest else None,
        "used_at": entry.used_at or None,
        "leases": leases(entry.digest),
        "damaged": manifest is None or (layout.folder("damaged") / entry.digest).exists(),
        "path": str(layout.adapter(entry.digest)),
    }
