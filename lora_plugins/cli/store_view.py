"""The store on this host as commands look at it: its adapters, their names and holders; looking writes nothing.

Runs in the command's process, beside servers that use the same store. In: the settings, and names, patterns, URIs or
beginnings of digests. Out: the `Entry` of each adapter that is meant, and its facts as JSON.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lora_plugins.absence import without_login
from lora_plugins.adapter.names import MIN_PREFIX, is_prefix
from lora_plugins.api.access.policy import NamePattern
from lora_plugins.cli import UsageProblem
from lora_plugins.cli.name_arguments import is_pattern, wanted
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError
from lora_plugins.resolvers.sources.templates import Template
from lora_plugins.settings import Settings
from lora_plugins.store.inventory import Entry, entries
from lora_plugins.store.layout import Layout
from lora_plugins.store.leases import Leases
from lora_plugins.store.processes import Processes
from lora_plugins.store.store import Store, open_store


class StoreView:
    """The store of the settings, which need not exist."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.layout = Layout(settings.store_dir)
        self.path = str(self.layout.root)
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

    def select_all(self, names: Sequence[str] | None, file: Path | None) -> tuple[list[Entry], list[LoRAPluginsError]]:
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
