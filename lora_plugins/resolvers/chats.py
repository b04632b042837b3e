"""What the versions in the store bring for chats, each read once from its snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from cachetools import LRUCache

from lora_plugins.adapter.chat import Chat, read_chat
from lora_plugins.settings import Settings
from lora_plugins.store.layout import Layout

_MOST = 512  # versions whose chats are kept in memory
_NOTHING = Chat()


class Chats:
    """Chats by the paths that engines read; files outside of the store bring nothing, because they may change.

    Attributes:
        served: what a server serves of an adapter's chat; the engine's tokenizer decides, once the engine is made.
    """

    def __init__(self, settings: Settings, layout: Layout) -> None:
        self._is_on = settings.adapter_chat.reads_files
        self._layout = layout
        self.served: Callable[[Chat], Chat] | None = None
        self._read: LRUCache[Path, Chat] = LRUCache(_MOST)  # of the event loop alone

    async def read(self, path: str) -> Chat:
        """Return what the version at `path` brings; the first time a thread reads the files.

        Raises:
            InvalidAdapter, SourceUnavailable: as `read_chat`.
        """
        directory = self._directory(path)
        if directory is not None and directory not in self._read:
            self._read[directory] = await asyncio.to_thread(self._served, directory)
        return self.at(path)

    def at(self, path: str) -> Chat:
        """Return what the version at `path` brings, and read the files in this thread where nobody has yet.

        Raises:
            InvalidAdapter, SourceUnavailable: as `read_chat`.
        """
        directory = self._directory(path)
        if directory is None:
            return _NOTHING
        if directory not in self._read:
            self._read[directory] = self._served(directory)
        return self._read[directory]

    def _served(self, directory: Path) -> Chat:
        chat = read_chat(directory)
        return chat if self.served is None else self.served(chat)

    def _directory(self, path: str) -> Path | None:
        digest = self._layout.digest_of(path) if self._is_on else None
        return None if digest is None else self._layout.adapter(digest)
