"""`pull`: bring adapters into the store, as a server would at the first request for each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lora_plugins.cli.lookup import LookUp, Stored, look_up, names_of_environment
from lora_plugins.cli.names import AskedName, NamesFile, expand, is_several, together, wanted
from lora_plugins.cli.output import Output, Result, line, size
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.settings import Settings


def pull(
    output: Output,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names or URIs, or patterns in quotes for names that the sources list ('team/*')."),
    ] = None,
    *,
    file: NamesFile = None,
    base_model: Annotated[
        str, typer.Option("--base-model", help="What {base_model_name} stands for in S3_PATH_TEMPLATE.")
    ] = "",
) -> Result:
    """Bring adapters into the store, verified."""
    settings = Settings.from_env()
    asked = expand(wanted(names, file), lambda: names_of_environment(settings, base_model), "the sources")
    pulled = [one if isinstance(one, LoRAPluginsError) else _look_up_of(one) for one in asked]
    look_up(output, settings, [one for one in pulled if isinstance(one, LookUp)], base_model)
    return together([_result(one) for one in pulled], is_list=is_several(names, file))


def bring(output: Output, settings: Settings, uri: str) -> Stored:
    """Fetch and verify the adapter at a URI, allowed by the settings or not.

    Raises:
        AdapterNotFound: there is no adapter. LoRAPluginsError: the adapter cannot be had, or cannot be served.
    """
    asked = LookUp.of(AskedName(uri))
    look_up(output, settings, [asked], "")
    return _stored(asked)


def _look_up_of(one: AskedName) -> LookUp | LoRAPluginsError:
    try:
        return LookUp.of(one)
    except LoRAPluginsError as error:
        if one.name.startswith(("/", "./", "../", "~/")) and one.uri is None:
            path = Path(os.path.expanduser(one.name)).absolute()  # `Path.expanduser` raises where there is no home
            error.remedy = f"for a directory of this machine use {path.as_uri()}"
        return error


def _result(pulled: LookUp | LoRAPluginsError) -> Result | LoRAPluginsError:
    if isinstance(pulled, LoRAPluginsError):
        return pulled
    try:
        stored = _stored(pulled)
    except LoRAPluginsError as error:
        return error
    found, manifest, elapsed_s = stored.adapter, stored.manifest, pulled.elapsed_s
    bytes_s = manifest.size_bytes / elapsed_s if stored.facts.fetched else None
    fields = {
        "name": found.name,
        "source": found.source,
        "uri": manifest.uri,
        "version": found.version,
        "digest": manifest.digest,
        "path": str(found.path),
        "size_bytes": manifest.size_bytes,
        "fetched": stored.facts.fetched,
        "elapsed_s": elapsed_s,
        "bytes_s": bytes_s,
    }
    how = "was there" if bytes_s is None else f"fetched in {elapsed_s:.2f} s ({size(bytes_s)}/s)"
    said = f"{found.name}: {size(manifest.size_bytes)} from {manifest.uri}, {how}"
    return Result(fields, [line(said), line(str(found.path))])


def _stored(pulled: LookUp) -> Stored:
    if pulled.found.error is not None:
        raise pulled.found.error
    if pulled.stored is None:
        absences = pulled.found.absences
        hints = [absence.hint for absence in absences if absence.hint]
        raise AdapterNotFound(
            "no such adapter: " + "; ".join(f"{absence.source}: {absence}" for absence in absences),
            expected="an adapter in one of these places",
            remedy=" ".join(hints) or "correct its spelling, or give its URI, such as hf://org/repo",
            adapter=pulled.text,
        )
    return pulled.stored
