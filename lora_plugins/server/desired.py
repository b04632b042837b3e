"""An adapter that a server is to serve under one name, whoever asks for the name."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_plugins.errors import LoRAPluginsError


@dataclass(frozen=True, slots=True)
class DesiredAdapter:
    """One adapter to serve.

    Attributes:
        uri: the place with its revision; None: any source of the server that has the name.
        held_digest: the digest of the only version to serve; None for the newest.
        is_pinned: keep the adapter in host memory and a slot.
        is_awaited: the server becomes ready only after a try of this adapter; no effect on a running server.
        last_digest: digest of the version that the server before this one served; None where no server wrote any.
            Of a declared adapter: the version that the server before this one was rolled back to.
        last_place: source of the version of `last_digest`, as `AdapterResolver.place_of` says.
        was_declared: the file of the server before this one declared the adapter.
    """

    name: str
    uri: str | None = None
    held_digest: str | None = None
    is_pinned: bool = False
    is_awaited: bool = field(default=True, compare=False)
    last_digest: str | None = field(default=None, compare=False)
    last_place: str = field(default="", compare=False)
    was_declared: bool = field(default=False, compare=False)


@dataclass(slots=True)
class Target:
    """One adapter to serve, and the result so far.

    Attributes:
        is_declared: the file declares the adapter; else the settings or the last server's list do.
        is_done: the adapter is served as wanted; or the start gave up, because the error is permanent or because
            somebody else has decided.
        error: the error of the last try.
    """

    adapter: DesiredAdapter
    is_declared: bool = False
    is_done: bool = False
    error: LoRAPluginsError | None = None
