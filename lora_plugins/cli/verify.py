"""`verify`: hash again what is in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from lora_plugins.cli.amounts import number
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Json, Output, Quiet
from lora_plugins.cli.stored import SHOWN_CHARACTERS, StoreView
from lora_plugins.settings import Settings


def verify(
    digests: Annotated[
        list[str] | None, typer.Argument(help="Beginnings of digests; all adapters without any.")
    ] = None,
    *,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Hash what is in the store again; quarantine damage."""
    output, settings = Output(as_json=as_json, quiet=quiet), Settings.from_env()
    view = StoreView(settings)
    chosen = [view.find_digest(prefix) for prefix in digests or ()] or [entry.digest for entry in view.entries()]
    adapters = []
    for digest in chosen:
        output.progress(f"hashing {digest[:SHOWN_CHARACTERS]}")
        whole = view.store.verify(digest)
        adapters.append({"digest": digest, "whole": whole, "quarantined": not view.layout.adapter(digest).exists()})
    damaged = sum(not adapter["whole"] for adapter in adapters)
    output.json({"store": str(view.layout.root), "adapters": adapters, "count": len(adapters), "damaged": damaged})
    output.table(
        ("digest", "verdict"),
        [(str(adapter["digest"])[:SHOWN_CHARACTERS], _verdict(adapter)) for adapter in adapters],
    )
    output.line(f"{number(len(adapters), 'adapter')}, {damaged} damaged", style="bold red" if damaged else "")
    return Exit.WRONG if damaged else Exit.OK


def _verdict(adapter: Mapping[str, object]) -> str:
    if adapter["whole"]:
        return "whole"
    if adapter["quarantined"]:
        return "damaged, quarantined"
    return "damaged, and in use: replaced once it is fetched again"
