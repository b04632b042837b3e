"""Find the version to serve for a name: wherever a source has the name, at a place, or of a digest.

Runs in the leading API server, before `swapping.change` serves the version. A name comes in, with the operator's URI or
digest where given; out comes a version whose files are in the store. The name holds a lease of the files, which the
caller passes on to `change`, or ends with `ApiServer.release`.
"""

from __future__ import annotations

from lora_plugins.adapter.names import why_absent
from lora_plugins.errors import AdapterNotFound
from lora_plugins.lifecycle.api_server import ApiServer
from lora_plugins.lifecycle.registry import gone_from_source
from lora_plugins.resolvers.known_versions import ResolvedAdapter
from lora_plugins.resolvers.sources.uri import is_by_path, is_from


async def find(server: ApiServer, name: str, uri: str | None) -> ResolvedAdapter:
    """The version at `uri`, or wherever the server's sources have the name; leased for the name.

    Raises:
        AdapterNotFound: no source has the adapter. LoRAPluginsError: the adapter cannot be served.
    """
    found = (await server.resolver.look_up(name, server.vllm.base_path, uri)).version()
    if found is None:
        raise why_absent(name) or AdapterNotFound(
            "no such adapter at any source",
            expected="one that a source of this server has",
            remedy="correct its name, or say where it is with source.uri",
            adapter=name,
        )
    return found


async def find_newest(server: ApiServer, name: str, uri: str | None) -> ResolvedAdapter:
    """Find as `find` does, for a name served before, whose place may be the path of one of vLLM's own calls.

    Raises:
        AdapterNotFound: the source has the adapter no more. LoRAPluginsError: the adapter cannot be served.
    """
    newest = await server.resolver.latest(name, uri, server.vllm.base_path)
    if newest is None:
        raise gone_from_source(name)
    return newest


async def find_version(server: ApiServer, name: str, uri: str | None, digest: str | None) -> ResolvedAdapter:
    """Find as `find` does, in the version of `digest` if given: from the store, or from the place.

    Raises:
        AdapterNotFound: neither has the version. LoRAPluginsError: the version cannot be served.
    """
    if digest is None:
        return await find(server, name, uri)
    # All 64 characters prove that the caller knows the version, so another name's copy counts too.
    kept = await server.resolver.of_digest(name, digest, of_any_name=True)
    if kept is not None:
        if uri is None or is_by_path(uri) or is_from(kept.uri, uri):
            return kept
        server.release(name, kept)  # the same bytes from another place
    found = await (find_newest if is_by_path(uri) else find)(server, name, uri)
    if found.digest != digest:
        server.release(name, found)
        raise AdapterNotFound(
            f"the version {found.digest[:12]} at its source",
            expected=f"{digest}, which the store does not have from there",
            remedy="put that version there, or declare another digest",
            adapter=name,
        )
    return found
