"""HTTP sources follow redirects of their own origin only.

An operator has named one origin. What it redirects to could be a machine that only this server reaches, and would get
the headers that were meant for the origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from lora_plugins.resolvers.sources.object_store.errors import HttpStatus


def client_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What is given to aiohttp's session: `options` of the operator, and that it stays."""
    return {**options, "trace_configs": [*options.get("trace_configs", ()), _staying()]}


@cache  # fsspec shares a file system between those who give it the same options
def _staying() -> Any:
    import aiohttp

    config = aiohttp.TraceConfig()
    config.on_request_redirect.append(_check)
    return config


async def _check(_: Any, __: Any, redirect: Any) -> None:
    """Called by aiohttp before it follows a redirect; one to HTTPS on the same host is followed too.

    Raises:
        HttpStatus: it leads elsewhere.
    """
    answer = redirect.response
    location = answer.headers.get("Location") or answer.headers.get("URI") or ""
    try:
        there = redirect.url.join(type(redirect.url)(location, encoded=True))
        is_upgrade = (redirect.url.scheme, there.scheme, there.host) == ("http", "https", redirect.url.host)
        stays = there.origin() == redirect.url.origin() or is_upgrade
    except ValueError:
        stays = False
    if not stays:
        answer.close()
        raise HttpStatus(answer.status, "that leads to another origin")
