"""The store: its adapters, and `verify`, `gc` and `rm`; looking writes nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import typer

from lora_plugins.absence import without_login
from lora_plugins.adapter.names import MIN_PREFIX, is_prefix
from lora_plugins.api.access.policy import NamePattern
from lora_plugins.cli import Exit, UsageProblem
from lora_plugins.cli.name_arguments import NamesFile, is_pattern, listed, wanted
from lora_plugins.cli.output import Output, Result, Shown, ago, counted, line, number, short, size, table_above
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError
from lora_plugins.lifecycle.served_file import lately_served
from lora_plugins.resolvers.sources.templates import Template
from lora_plugins.settings import Settings
from lora_plugins.store.eviction import damaged_in
from lora_plugins.store.inventory import Entry, entries
from lora_plugins.store.layout import Layout
from lora_plugins.store.leases import Leases
from lora_plugins.store.processes import Processes
from lora_plugins.store.store import Store, open_store
from lora_plugins.variables import SIZE_EXPECTED, bytes_of

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]


class StoreView:
    """The store of the settings, which need not exist."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.layout = Layout(settings.store_dir)
        self._processes = Processes(self.layout.folder("processes"))
        self._leases = Leases(self.layout, self._processes)

    @functools.cached_property
    def store(self) -> Store:
        """The store itself, to change it; made where the store does not exist.

        Raises:
            InvalidSettings: the store cannot be written.
        """
        return open_store(self.settings)

    def entries(self) -> list[Entry]:
        """Return the published adapters, the least recently used first; nothing where the store has never been made.

        Raises:
            InvalidSettings: the store cannot be read.
        """
        root = self.layout.root
        if not root.exists():
            return []
        try:
            return entries(self.layout)
        except OSError as error:
            found = f"a store below {root} that answers '{error.strerror or type(error).__name__}'"
            remedy = "set LORA_PLUGINS_STORE_DIR, or run as the server's user"
            raise InvalidSettings(found, expected="a directory that can be read", remedy=remedy) from error

    def holders(self, entry: Entry) -> list[str]:
        return [self._processes.describe(name) for name in self._leases.holders(entry.digest)]

    def row(self, entry: Entry) -> dict[str, Any]:
        """Return an adapter as JSON."""
        manifest, damaged = entry.manifest, self.layout.folder("damaged") / entry.digest
        of_manifest = {name: getattr(manifest, name, None) for name in ("uri", "version", "fetched_at")}
        row = {"digest": entry.digest, "name": self.name_of(entry), "size_bytes": entry.size_bytes, **of_manifest}
        row |= {"used_at": entry.used_at or None, "leases": len(self._leases.holders(entry.digest))}
        is_damaged = manifest is None or damaged.exists()
        return {**row, "damaged": is_damaged, "path": str(self.layout.adapter(entry.digest))}

    def name_of(self, entry: Entry) -> str | None:
        """Return the name by which the sources of the settings know an adapter; None without such a source."""
        uri = "" if entry.manifest is None else entry.manifest.uri
        if uri.startswith("hf://"):
            return uri.removeprefix("hf://")
        root = self.settings.filesystem_root
        if root is not None and uri.startswith(f"{root.as_uri()}/"):
            return unquote(uri.removeprefix(f"{root.as_uri()}/"))
        template = (self.settings.s3_path_template or "").rstrip("/")
        if not template or not uri:
            return None
        url = template if "://" in template else f"s3://{template.lstrip('/')}"
        name = Template(url.replace("s3a://", "s3://", 1), "S3_PATH_TEMPLATE").read(uri, "")
        return None if name is None else str(name)

    def select(self, text: str) -> list[Entry]:
        """Return the published adapters that match a name, a pattern of names, a URI, or the beginning of a digest.

        Raises:
            AdapterNotFound: there is no match. UsageProblem: the text is the beginning of several digests.
        """
        known = self.entries()
        if is_prefix(text):
            found = [entry for entry in known if entry.digest.startswith(text)]
            if len(found) > 1:
                raise UsageProblem(f"'{text}' is the beginning of {len(found)} digests; give more of it")
            if found:
                return found
        if "://" in text:
            found = [entry for entry in known if entry.manifest is not None and entry.manifest.uri == text.rstrip("/")]
        else:
            fits = NamePattern(text).matches if is_pattern(text) else text.__eq__
            found = [entry for entry in known if (name := self.name_of(entry)) is not None and fits(name)]
        if not found:
            raise AdapterNotFound(
                "no such adapter in the store",
                expected=f"a name, URI or digest ({MIN_PREFIX} characters of it) of what {self.layout.root} has",
                remedy="'lora-plugins ls' shows what is there",
                adapter=without_login(text),
            )
        return found

    def select_all(
        self, names: Sequence[str] | None, file: Path | None
    ) -> tuple[Sequence[Entry], list[LoRAPluginsError]]:
        """Return the adapters that `select` finds for all names, each once, and an error for each name without a match.

        Raises:
            UsageProblem: as `select` raises, or without names.
        """
        found: dict[str, Entry] = {}
        errors: list[LoRAPluginsError] = []
        for one in wanted(names, file):
            try:
                found.update((entry.digest, entry) for entry in self.select(one.name))
            except AdapterNotFound as error:
                errors.append(error)
        return list(found.values()), errors


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
    together = _listed(view, adapters, errors, [*table_above(("digest", "verdict"), cells), end], damaged=damaged)
    return replace(together, code=Exit.WRONG if damaged else Exit.OK)


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
    numbers = {"max_bytes": budget, "before_bytes": before_bytes, "after_bytes": left_bytes, "fits": fits}
    together = _listed(view, rows, [], shown, dry_run=dry_run, **numbers)
    return replace(together, code=Exit.OK if fits else Exit.NO_ROOM)


def _listed(
    view: StoreView, rows: Iterable[dict[str, Any]], errors: Iterable[LoRAPluginsError], shown: list[Shown], **more: Any
) -> Result:
    """Return adapters, and errors of names, as every command lists adapters; `shown` is below the errors."""
    together = listed([*errors, *(Result(row, []) for row in rows)], store=str(view.layout.root), **more)
    return replace(together, shown=[*together.shown, *shown])


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
    together = _listed(view, rows, errors, shown, dry_run=dry_run, removed_bytes=sum(removed))
    return replace(together, code=Exit.OK if len(removed) == len(rows) else Exit.NO_ROOM)
