"""`verify`: hash again what is in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from lora_plugins.cli.amounts import number
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Json, Output, Quiet, error_fields
from lora_plugins.cli.progress import counted
from lora_plugins.cli.several import NamesFile, failure, wanted
from lora_plugins.cli.stored import SHOWN_CHARACTERS, StoreView
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import Settings


def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Beginnings of digests, names, patterns in quotes, or URIs; all adapters without any."),
    ] = None,
    *,
    file: NamesFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Hash what is in the store again; quarantine damage."""
    output, settings = Output(as_json=as_json, quiet=quiet), Settings.from_env()
    view = StoreView(settings)
    errors: list[LoRAPluginsError] = []
    chosen = [entry.digest for entry in view.entries()]
    if names or file is not None:
        found, errors = view.select_all([one.name for one in wanted(names, file)])
        chosen = [entry.digest for entry in found]
    codes = [failure(output, error) for error in errors]
    adapters = []
    for digest in counted(output, chosen, len(chosen), "hashed"):
        if not output.shows_progress or len(chosen) < 2:
            output.progress(f"hashing {digest[:SHOWN_CHARACTERS]}")
        whole = view.store.verify(digest)
        adapters.append({"digest": digest, "whole": whole, "quarantined": not view.layout.adapter(digest).exists()})
    damaged = sum(not adapter["whole"] for adapter in adapters)
    output.json(
        {
            "store": str(view.layout.root),
            "adapters": adapters,
            "count": len(adapters),
            "damaged": damaged,
            "errors": [error_fields(error) for error in errors],
        }
    )
    output.table(
        ("digest", "verdict"),
        [(str(adapter["digest"])[:SHOWN_CHARACTERS], _verdict(adapter)) for adapter in adapters],
    )
    output.line(f"{number(len(adapters), 'adapter')}, {damaged} damaged", style="bold red" if damaged else "")
    return max([Exit.WRONG if damaged else Exit.OK, *codes])


def _verdict(adapter: Mapping[str, object]) -> str:
    if adapter["whole"]:
        return "whole"
    if adapter["quarantined"]:
        return "damaged, quarantined"
    return "damaged, and in use: replaced once it is fetched again"
