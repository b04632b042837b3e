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
        last_digest: of the version that a server before this one served last; None where no server wrote that down.
        last_place: where that version came from, as `AdapterResolver.place_of` says.
    """

    name: str
    uri: str | None = None
    held_digest: str | None = None
    is_pinned: bool = False
    is_awaited: bool = field(default=True, compare=False)
    last_digest: str | None = field(default=None, compare=False)
    last_place: str = field(default="", compare=False)


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
