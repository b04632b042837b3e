"""Open the store that the settings name."""

from __future__ import annotations

from lora_plugins.errors import InvalidSettings
from lora_plugins.settings import Settings
from lora_plugins.store.errors import FULL
from lora_plugins.store.store import Store


def open_store(settings: Settings) -> Store:
    """The store below `LORA_PLUGINS_STORE_DIR`.

    Raises:
        InvalidSettings: the store cannot be made or written, is another user's, or its file system has no hard links or
            no working locks.
    """
    try:
        return Store(
            settings.store_dir,
            max_bytes=settings.store_max_bytes,
            has_share=True,
            fetch_timeout_s=settings.fetch_timeout_s,
        )
    except OSError as error:
        raise InvalidSettings(
            f"a store below {settings.store_dir} that answers '{error.strerror or type(error).__name__}'",
            expected="a directory that can be written",
            remedy="free space or inodes there, by hand if need be: each directory named by a digest is an adapter"
            if error.errno in FULL
            else "set LORA_PLUGINS_STORE_DIR to this user's, or share it by a group: lora-plugins explain L007",
        ) from error
