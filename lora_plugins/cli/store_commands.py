"""`verify`, `gc` and `rm`: hash the adapters in this host's store again, or remove some.

Runs in the command's process, beside servers that use the same store: what a server leases stays. In: names, or a
budget in bytes. Out: a row for each adapter with its fate, as a table and as JSON. With `--dry-run` nothing is changed.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lora_plugins.cli import Exit, UsageProblem
from lora_plugins.cli.name_arguments import NamesFile
from lora_plugins.cli.output import Output, Result, ago, line, listed, number, short, size, table_above
from lora_plugins.cli.progress_bars import counted
from lora_plugins.cli.store_view import StoreView
from lora_plugins.lifecycle.served_file import lately_served
from lora_plugins.settings import Settings
from lora_plugins.store.eviction import damaged_in
from lora_plugins.variables import SIZE_EXPECTED, bytes_of

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]


def verify(
    output: Output,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Beginnings of digests, names, patterns in quotes, or URIs; all adapters without any."),
    ] = None,
    *,
    file: NamesFile = None,
) -> Result:
    """Hash what is in the store again; mark what is damaged.

    Examples:
        verify
        verify 583503f503f1
        verify 'team/*'
    """
    view = StoreView(Settings.from_env())
    chosen, errors = view.select_all(names, file) if names or file is not None else (view.entries(), [])
    adapters: list[dict[str, Any]] = []
    for entry in counted(output, chosen, len(chosen), "hashed"):
        if not output.shows_progress or len(chosen) < 2:
            output.progress(f"hashing {short(entry.digest)}")
        adapters.append({"digest": entry.digest, "whole": view.store.verify(entry.digest)})
    damaged = sum(not one["whole"] for one in adapters)
    said = {True: "whole", False: "damaged: replaced once it is fetched again"}
    cells = [(short(one["digest"]), said[one["whole"]]) for one in adapters]
    end = line(f"{number(len(adapters), 'adapter')}, {damaged} damaged", "bold red" if damaged else "")
    shown = [*table_above(("digest", "verdict"), cells), end]
    code = Exit.WRONG if damaged else Exit.OK
    return listed([*errors, *map(Result, adapters)], below=shown, code=code, store=view.path, damaged=damaged)


def gc(
    *,
    max_bytes: Annotated[
        str | None, typer.Option(help="The budget to reach, such as 20Gi; LORA_PLUGINS_STORE_MAX_BYTES without it.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove also what servers have served in the last seven days, last of all.")
    ] = False,
    dry_run: DryRun = False,
) -> Result:
    """Remove adapters until the rest fits.

    Leased adapters stay, and adapters served in the last seven days, unless the store exceeds
    LORA_PLUGINS_STORE_MAX_BYTES.

    Examples:
        gc --dry-run --max-bytes 20GB
        gc
    """
    view = StoreView(Settings.from_env())
    budget = _budget(view.settings, max_bytes)
    known, served = view.entries(), lately_served(view.layout.root)
    left_bytes = before_bytes = sum(entry.size_bytes for entry in known)
    limit = view.settings.store_max_bytes
    # Up to this level adapters that were served lately stay: with `--all` none, without a limit of the store all.
    kept_bytes = 0 if everything else before_bytes if limit is None else limit
    rows: list[dict[str, Any]] = []
    damaged = damaged_in(view.layout)
    for entry in sorted(known, key=lambda entry: (entry.digest not in damaged, entry.digest in served)):
        if left_bytes <= budget:
            break
        row, is_served = view.row(entry), entry.digest in served
        is_kept = is_served and left_bytes <= kept_bytes
        is_gone = not is_kept and (not row["leases"] if dry_run else view.store.remove(entry.digest))
        left_bytes -= entry.size_bytes if is_gone else 0
        state = "removed" if is_gone else "served" if is_served and not row["leases"] else "leased"
        rows.append({**row, "state": state})
    ends = {"removed": _removed(dry_run), "leased": "stays: leased", "served": "stays: served lately"}
    fits = left_bytes <= budget
    cells = [(short(row["digest"]), size(row["size_bytes"]), ago(row["used_at"]), ends[row["state"]]) for row in rows]
    shown = table_above(("digest", "size", "used", ""), cells)
    shown.append(line(f"{size(before_bytes)} before, {size(left_bytes)} after, budget {size(budget)}"))
    if not fits:
        is_served = any(row["state"] == "served" for row in rows)
        stays = "was served in the last 7 days: --all removes it too" if is_served else "is leased by running servers"
        shown.append(line(f"what would still have to go {stays}", "bold red"))
    code = Exit.OK if fits else Exit.NO_ROOM
    numbers: dict[str, Any] = {"max_bytes": budget, "before_bytes": before_bytes, "after_bytes": left_bytes}
    return listed(map(Result, rows), below=shown, code=code, store=view.path, dry_run=dry_run, **numbers, fits=fits)


def _removed(dry_run: bool) -> str:
    return "would be removed" if dry_run else "removed"


def _budget(settings: Settings, text: str | None) -> int:
    # `bytes_of` refuses zero: for `gc` zero is the budget of an empty store.
    budget = settings.store_max_bytes if text is None else 0 if text.strip() == "0" else bytes_of(text)
    if budget is not None:
        return budget
    if text is None:
        raise UsageProblem("gc needs a budget: give --max-bytes, or set LORA_PLUGINS_STORE_MAX_BYTES")
    raise UsageProblem(f"--max-bytes {text}: expected {SIZE_EXPECTED}, or 0")


def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names, patterns in quotes, URIs, or beginnings of digests: all versions of each."),
    ] = None,
    *,
    file: NamesFile = None,
    dry_run: DryRun = False,
) -> Result:
    """Remove adapters from the store, unless they are in use.

    Examples:
        rm team/sql
        rm 'old/*' --dry-run
        rm 583503f503f1
    """
    view = StoreView(Settings.from_env())
    found, errors = view.select_all(names, file)
    rows: list[dict[str, Any]] = []
    cells: list[tuple[str, ...]] = []
    for entry in found:
        row, holders = view.row(entry), view.holders(entry)
        is_gone = not holders if dry_run else view.store.remove(entry.digest)
        state = "removed" if is_gone else "leased"
        rows.append({**row, "state": state, "holders": [] if is_gone else holders})
        said = _removed(dry_run) if is_gone else f"stays: leased by {', '.join(holders) or 'another process'}"
        cells.append((short(entry.digest), size(entry.size_bytes), said, row["uri"] or "?"))
    removed = [row["size_bytes"] for row in rows if row["state"] == "removed"]
    end = line(f"{number(len(removed), 'adapter')} {_removed(dry_run)}, {size(sum(removed))}")
    shown = [*table_above(("digest", "size", "", "uri"), cells), end]
    code = Exit.OK if len(removed) == len(rows) else Exit.NO_ROOM
    more = {"store": view.path, "dry_run": dry_run, "removed_bytes": sum(removed)}
    return listed([*errors, *map(Result, rows)], below=shown, code=code, **more)
