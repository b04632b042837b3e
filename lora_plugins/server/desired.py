"""What a server is to serve under one name, whoever says so."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_plugins.errors import LoRAPluginsError


@dataclass(frozen=True, slots=True)
class DesiredAdapter:
    """One adapter that is to be served.

    Attributes:
        uri: where it is, with its revision; None: wherever the server's sources have its name.
        held_digest: of the one version that is to be served.
        is_pinned: it stays in host memory and a slot.
        is_awaited: the server is ready only when it was tried; nothing of a server that runs.
    """

    name: str
    uri: str | None = None
    held_digest: str | None = None
    is_pinned: bool = False
    is_awaited: bool = field(default=True, compare=False)


@dataclass(slots=True)
class Target:
    """One adapter that is to be served, and what became of it.

    Attributes:
        is_declared: the file says so; else the start did.
        is_done: it is served as it is to be; or the start has it no more, as it never can be, or somebody else decided.
        error: why it could not be served the last time.
    """

    adapter: DesiredAdapter
    is_declared: bool = False
    is_done: bool = False
    error: LoRAPluginsError | None = None
