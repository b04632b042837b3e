"""What the versions in the store bring for chats (template, end tokens, added tokens), by the paths that engines read.

Runs in an API server: `read` on its event loop, `at` also where vLLM's code cannot await. In goes a path of a request's
adapter; out comes a `Chat`. No file is opened here: reading processes (`verification/`) read, because what an adapter
contains is not trusted, and this module keeps their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from cachetools import LRUCache

from lora_plugins.adapter.chat import Chat
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, SourceUnavailable
from lora_plugins.resolvers.single_flight import SingleFlight
from lora_plugins.settings import Settings
from lora_plugins.store.disk_errors import DamagedCopy
from lora_plugins.store.layout import Layout
from lora_plugins.verification.children import children
from lora_plugins.verification.protocol import ReadAdapter, encode

_MOST_BYTES = 64 << 20  # of all chats kept, as messages: most have 10 KB, and none has 20 MB
_TOKEN_BYTES = 80  # of an added token in a message, about


class _KeptChat(NamedTuple):
    """A version's chat: as its files have the chat, or if `is_served`, the part that this server serves."""

    chat: Chat
    is_served: bool = False


def _size_bytes(kept: _KeptChat) -> int:
    # Tokens are estimated: an event loop asks, and encoding 65,800 tokens would take 20 ms.
    return len(encode(replace(kept.chat, added_tokens=()))) + _TOKEN_BYTES * len(kept.chat.added_tokens)


class Chats:
    """Chats of versions, kept by digest; files outside of the store bring nothing, because they may change.

    `versions.py` keeps the chat of each version that this process verifies. Where this process has not verified the
    version, or has kept other chats since, a reading process is asked.

    Attributes:
        served: gives the part of a chat that the server can serve, as the engine's tokenizer decides; may take seconds.
            None until the engine is made.
        of_leader: asks the first of several API servers for the chat at a path; None in the first server itself.
    """

    def __init__(self, settings: Settings, layout: Layout) -> None:
        self._settings, self._layout = settings, layout
        self.served: Callable[[Chat], Chat] | None = None
        self.of_leader: Callable[[str], Awaitable[Chat]] | None = None
        # Used by one thread only, the event loop's.
        self._kept: LRUCache[str, _KeptChat] = LRUCache(_MOST_BYTES, _size_bytes)
        self._once: SingleFlight[str, Chat] = SingleFlight()

    def keep(self, digest: str, chat: Chat, *, is_served: bool = False) -> _KeptChat:
        """Keep the chat of a version, as a reading process has read it, or if `is_served`, as the server serves it."""
        kept = self._kept[digest] = _KeptChat(chat, is_served)
        return kept

    async def read(self, path: str) -> Chat:
        """Return the chat of the version at `path`.

        Raises:
            LoRAPluginsError: a reading process was asked, and cannot read the files.
        """
        if (digest := self._digest(path)) is None:
            return Chat()
        if (kept := self._kept.get(digest)) is None:
            kept = self.keep(digest, await self._once.run(digest, lambda: self._read(digest)))
        if not kept.is_served and self.served is not None:
            chat = await asyncio.to_thread(self.served, kept.chat)  # makes a tokenizer
            # Replaces the chat as read: nobody needs the list of the base model's own tokens any more.
            kept = self.keep(digest, chat, is_served=True)
        return kept.chat

    def at(self, path: str) -> Chat:
        """Return as `read` does, for callers that cannot await; without an earlier `read`, this thread may wait.

        Raises:
            LoRAPluginsError: as `read`.
        """
        if (digest := self._digest(path)) is None:
            return Chat()
        if (kept := self._kept.get(digest)) is None:
            kept = self.keep(digest, self._ask(digest).result().adapter.chat)
        if not kept.is_served and self.served is not None:
            kept = self.keep(digest, self.served(kept.chat), is_served=True)
        return kept.chat

    async def _read(self, digest: str) -> Chat:
        try:
            return (await asyncio.wrap_future(self._ask(digest))).adapter.chat
        except (AdapterNotFound, SourceUnavailable) as error:
            if self.of_leader is not None:  # an engine may hold the weights of a copy that nobody can read any more
                with suppress(LoRAPluginsError):
                    return await self.of_leader(str(self._layout.adapter(digest)))
            if isinstance(error, AdapterNotFound):
                raise DamagedCopy.of(digest) from None
            raise

    def _ask(self, digest: str) -> Future[ReadAdapter]:
        return children().read(self._layout.adapter(digest), self._settings, config_only=True)

    def _digest(self, path: str) -> str | None:
        """The digest of a version in the store; None elsewhere, and where the settings say that no chat is read."""
        return self._layout.digest_of(path) if self._settings.adapter_chat.reads_files else None
