"""`pull`: bring an adapter into the store, as a server would at the first request for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from lora_plugins.adapter.names import AdapterName
from lora_plugins.cli.amounts import size
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Json, Output, Quiet
from lora_plugins.cli.progress import shown_progress
from lora_plugins.cli.sources import require_sources, resolver_of_environment
from lora_plugins.errors import AdapterNotFound
from lora_plugins.resolvers.resolution import AdapterResolver
from lora_plugins.resolvers.uris import SourceUri
from lora_plugins.resolvers.versions import ResolvedAdapter
from lora_plugins.settings import Settings
from lora_plugins.store.manifest import Manifest


def pull(
    name: Annotated[str, typer.Argument(help="The adapter's name, or a URI.")],
    *,
    base_model: Annotated[
        str, typer.Option("--base-model", help="What {base_model_name} stands for in S3_PATH_TEMPLATE.")
    ] = "",
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Bring an adapter into the store, verified."""
    output = Output(as_json=as_json, quiet=quiet)
    started = time.perf_counter()
    pulled = bring(output, Settings.from_env(), name, base_model)
    elapsed_s = time.perf_counter() - started
    found, manifest = pulled.adapter, pulled.manifest
    bytes_s = manifest.size_bytes / elapsed_s
    output.json(
        {
            "name": found.name,
            "source": found.source,
            "uri": manifest.uri,
            "version": found.version,
            "digest": manifest.digest,
            "path": str(found.path),
            "size_bytes": manifest.size_bytes,
            "fetched": pulled.fetched,
            "elapsed_s": elapsed_s,
            "bytes_s": bytes_s if pulled.fetched else None,
        }
    )
    how = f"fetched in {elapsed_s:.2f} s ({size(bytes_s)}/s)" if pulled.fetched else "was there"
    output.line(f"{found.name}: {size(manifest.size_bytes)} from {manifest.uri}, {how}")
    output.line(str(found.path))
    return Exit.OK


@dataclass(frozen=True, slots=True)
class Pulled:
    """What is now in the store, and whether it had to be fetched."""

    adapter: ResolvedAdapter
    manifest: Manifest
    fetched: bool


def bring(output: Output, settings: Settings, text: str, base_path: str = "") -> Pulled:
    """Fetch and verify the adapter of a name, or the one at a URI, which need not be among the allowed ones.

    Raises:
        AdapterNotFound: there is none.
        LoRAPluginsError: it cannot be had, or is not one that can be served.
    """
    uri = SourceUri.parse(text) if "://" in text else None
    if uri is None:
        AdapterName.parse(text)
    else:
        settings = replace(settings, allowed_uris=(*settings.allowed_uris, str(_prefix(uri))))
    resolver = resolver_of_environment(settings)
    if uri is None:
        require_sources(resolver)
    before = set(resolver.store.layout.digests())
    found = asyncio.run(_resolve(output, resolver, text, uri, base_path))
    try:
        return Pulled(found, Manifest.read(found.path), found.digest not in before)
    finally:
        resolver.release(found.name, found.path)


async def _resolve(
    output: Output, resolver: AdapterResolver, text: str, uri: SourceUri | None, base_path: str
) -> ResolvedAdapter:
    async with shown_progress(output, resolver.store, text):
        if uri is not None:
            return await resolver.resolve_uri(_name_of(uri), text, base_path)
        found = await resolver.resolve(text, base_path)
    if found is None:
        raise AdapterNotFound(
            "no such adapter",
            expected="one in " + ", ".join(str(source) for source in resolver.sources),
            remedy="look at its spelling; 'lora-plugins resolve' says what each source answers",
            adapter=text,
        )
    return found


def _prefix(uri: SourceUri) -> SourceUri:
    """What is allowed by naming `uri`: its directory, or on the Hub its repository."""
    return SourceUri(uri.scheme, uri.authority, uri.segments[:1] if uri.scheme == "hf" else uri.segments[:-1])


def _name_of(uri: SourceUri) -> str:
    """A name for messages: the last part of the URI, where that is one."""
    last = uri.segments[-1] if uri.segments else ""
    try:
        return str(AdapterName.parse(last))
    except AdapterNotFound:
        return "unnamed"
