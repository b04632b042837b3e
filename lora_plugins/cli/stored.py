"""What `ls`, `verify`, `gc`, `rm` and `inspect` see of the store; nothing is written by looking."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from lora_plugins.absence import without_login
from lora_plugins.api.access.name_patterns import NamePattern
from lora_plugins.cli.exits import UsageProblem
from lora_plugins.cli.several import is_pattern
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError
from lora_plugins.resolvers.sources.templates import Template
from lora_plugins.settings import Settings
from lora_plugins.store.eviction import Entry, entries
from lora_plugins.store.layout import MIN_PREFIX, Layout, is_prefix
from lora_plugins.store.leases import Leases
from lora_plugins.store.opening import open_store
from lora_plugins.store.processes import Processes
from lora_plugins.store.store import Store

SHOWN_CHARACTERS = 12  # of a digest


class StoreView:
    """The store of the settings, which need not be there."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.layout = Layout(settings.store_dir)
        self.processes = Processes(self.layout.folder("processes"))
        self.leases = Leases(self.layout, self.processes)

    @functools.cached_property
    def store(self) -> Store:
        """The store itself, to change it; made where it is not there.

        Raises:
            InvalidSettings: it cannot be written.
        """
        return open_store(self._settings)

    def entries(self) -> list[Entry]:
        """What is published, the one used longest ago first; nothing where the store has never been made.

        Raises:
            InvalidSettings: the store cannot be read.
        """
        root = self.layout.root
        if not root.exists():
            return []
        try:
            return entries(self.layout)
        except OSError as error:
            raise InvalidSettings(
                f"a store below {root} that answers '{error.strerror or type(error).__name__}'",
                expected="a directory that can be read",
                remedy="set LORA_PLUGINS_STORE_DIR, or run as the server's user",
            ) from error

    def row(self, entry: Entry) -> dict[str, Any]:
        """One adapter as JSON has it."""
        manifest = entry.manifest
        return {
            "digest": entry.digest,
            "name": self.name_of(manifest.uri) if manifest else None,
            "uri": manifest.uri if manifest else None,
            "version": manifest.version if manifest else None,
            "size_bytes": entry.size_bytes,
            "fetched_at": manifest.fetched_at if manifest else None,
            "used_at": entry.used_at or None,
            "leases": len(self.leases.holders(entry.digest)),
            "damaged": manifest is None or (self.layout.folder("damaged") / entry.digest).exists(),
            "path": str(self.layout.adapter(entry.digest)),
        }

    def name_of(self, uri: str) -> str | None:
        """The name by which the sources of the settings know what lies at `uri`; None where none of them does."""
        settings = self._settings
        if uri.startswith("hf://"):
            return uri.removeprefix("hf://")
        if settings.filesystem_root is not None and uri.startswith(f"{settings.filesystem_root.as_uri()}/"):
            return unquote(uri.removeprefix(f"{settings.filesystem_root.as_uri()}/"))
        template = (settings.s3_path_template or "").rstrip("/")
        if not template:
            return None
        url = template if "://" in template else f"s3://{template.lstrip('/')}"
        name = Template(url.replace("s3a://", "s3://", 1), "S3_PATH_TEMPLATE").read(uri, "")
        return None if name is None else str(name)

    def select_all(self, texts: Sequence[str]) -> tuple[list[Entry], list[LoRAPluginsError]]:
        """What `select` finds for several, each adapter once, and an error for each that stands for none.

        Raises:
            AdapterNotFound: the only one stands for none. UsageProblem: as `select` does.
        """
        if len(texts) == 1:
            return self.select(texts[0]), []
        found: dict[str, Entry] = {}
        errors: list[LoRAPluginsError] = []
        for text in texts:
            try:
                found.update((entry.digest, entry) for entry in self.select(text))
            except AdapterNotFound as error:
                errors.append(error)
        return list(found.values()), errors

    def select(self, text: str) -> list[Entry]:
        """The published adapters that a name, a pattern of names, a URI, or the beginning of a digest stands for.

        Raises:
            AdapterNotFound: there is none.
            UsageProblem: this is the beginning of several digests.
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
            names = {entry.digest: self.name_of(entry.manifest.uri) for entry in known if entry.manifest is not None}
            fits = NamePattern(text).matches if is_pattern(text) else text.__eq__
            found = [entry for entry in known if (name := names.get(entry.digest)) is not None and fits(name)]
        if not found:
            raise AdapterNotFound(
                "no such adapter in the store",
                expected=f"a name, URI or digest ({MIN_PREFIX} characters of it) of what {self.layout.root} has",
                remedy="'lora-plugins ls' shows what is there",
                adapter=without_login(text),
            )
        return found
