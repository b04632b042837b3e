"""`push`: send the adapter in a directory to a running server, as the next version of a name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import typer

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.api.models import PushStatus
from lora_plugins.cli.exits import UsageProblem
from lora_plugins.cli.output import Result, table
from lora_plugins.cli.server import DEFAULT_URL, AdminClient, ServerUrl
from lora_plugins.cli.verbs import row_of


def push(
    directory: Annotated[Path, typer.Argument(help="A PEFT directory.")],
    name: Annotated[str, typer.Argument(help="What requests will ask for.")],
    *,
    inflight: Annotated[
        bool, typer.Option("--inflight", help="Running requests go on with the new version, from one step on.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep the adapter in host memory and in a slot.")] = False,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, max=100, help="Earlier versions that stay, as NAME@DIGEST.")
    ] = None,
    if_match: Annotated[
        str | None, typer.Option("--if-match", help="Only if the served version's digest is this text, or begins so.")
    ] = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for the answer.")] = 600.0,
) -> Result:
    """Send an adapter to a server, as the next version of a name."""
    from lora_plugins.client.body import archive_of  # httpx takes a tenth of a second, and no other command needs it

    if not (directory / CONFIG_FILE).is_file():
        raise UsageProblem(f"{directory}: no directory with {CONFIG_FILE}")
    client = AdminClient(url, timeout_s)
    options = {"mode": "inflight"} if inflight else {}
    options |= {"pin": "true"} if pin else {}
    options |= {} if keep is None else {"keep": str(keep)}
    path = f"/{quote(name)}" + (f"?{urlencode(options)}" if options else "")
    expected = None if if_match is None else client.whole_digest(name, if_match)
    body, headers = archive_of(directory)
    status = client.ask(PushStatus, "PUT", path, body, if_match=expected, headers=headers)
    heads = ("name", "digest", "previous", "swapped", "took", "result")
    return Result(status.model_dump(mode="json"), [table(heads, [row_of(status)])])
