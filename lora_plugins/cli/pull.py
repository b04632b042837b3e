"""`pull`: bring an adapter into the store, as a server would at the first request for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path

from lora_plugins.adapter.names import AdapterName
from lora_plugins.cli.amounts import size
from lora_plugins.cli.chain import chain_of_environment, need_sources
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Output
from lora_plugins.cli.progress import shown_progress
from lora_plugins.errors import AdapterNotFound
from lora_plugins.resolvers.resolution import SourceChain
from lora_plugins.resolvers.uris import SourceUri
from lora_plugins.resolvers.versions import ResolvedAdapter
from lora_plugins.settings import Settings
from lora_plugins.store.manifest import Manifest


def pull(output: Output, settings: Settings, text: str, base_path: str) -> Exit:
    """Fetch and verify the adapter of a name, or the one at a URI, which need not stand in the list of allowed ones.

    Raises:
        AdapterNotFound: there is none.
        LoRAPluginsError: it cannot be had, or is not one that can be served.
    """
    started = time.perf_counter()
    pulled = _bring(output, settings, text, base_path)
    report(output, pulled, elapsed_s=time.perf_counter() - started)
    return Exit.OK


def pull_uri(output: Output, settings: Settings, uri: str) -> tuple[Path, str]:
    """Fetch the adapter at a URI; returns its directory in the store, and the URI in its one spelling.

    Raises:
        LoRAPluginsError: as `pull`.
    """
    pulled = _bring(output, settings, uri, "")
    return pulled.adapter.path, Manifest.read(pulled.adapter.path).uri


@dataclass(frozen=True, slots=True)
class Pulled:
    """What is now in the store, and whether it had to be fetched."""

    adapter: ResolvedAdapter
    fetched: bool


def _bring(output: Output, settings: Settings, text: str, base_path: str) -> Pulled:
    uri = SourceUri.parse(text) if "://" in text else None
    if uri is None:
        AdapterName.parse(text)
    else:
        settings = replace(settings, allowed_uris=(*settings.allowed_uris, str(_prefix(uri))))
    with chain_of_environment(settings, None, hook=lambda _: None, tell=lambda _: None) as chain:
        if uri is None:
            need_sources(chain)
        before = set(chain.store.layout.digests())
        found = asyncio.run(_resolve(output, chain, text, uri, base_path))
        try:
            return Pulled(found, found.path.name not in before)
        finally:
            chain.release_digest(found.path.name)


async def _resolve(
    output: Output, chain: SourceChain, text: str, uri: SourceUri | None, base_path: str
) -> ResolvedAdapter:
    async with shown_progress(output, chain.store, text):
        if uri is not None:
            return await chain.resolve_uri(_name_of(uri), text, base_path)
        found = await chain.resolve(text, base_path)
    if found is None:
        raise AdapterNotFound(
            "no such adapter",
            expected="one in " + ", ".join(str(source) for source in chain.sources),
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


def report(output: Output, pulled: Pulled, *, elapsed_s: float) -> None:
    """Say what is now in the store."""
    found, fetched = pulled.adapter, pulled.fetched
    manifest = Manifest.read(found.path)
    output.json(
        {
            "name": found.name,
            "source": found.source,
            "uri": manifest.uri,
            "version": found.version,
            "digest": manifest.digest,
            "path": str(found.path),
            "size_bytes": manifest.size_bytes,
            "fetched": fetched,
            "elapsed_s": elapsed_s,
            "bytes_s": manifest.size_bytes / elapsed_s if fetched else None,
        }
    )
    speed = f"fetched in {elapsed_s:.2f} s ({size(manifest.size_bytes / elapsed_s)}/s)" if fetched else "was there"
    output.line(f"{found.name}: {size(manifest.size_bytes)} from {manifest.uri}, {speed}")
    output.line(str(found.path))
