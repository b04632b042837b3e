"""A directory tree of adapters: `team/sql` is `<root>/team/sql`, and `team/sql@v3` is `<root>/team/sql@v3`."""

from __future__ import annotations

import asyncio
import os
import stat
from concurrent.futures import Executor
from pathlib import Path

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.verify import PICKLE_FILES, WEIGHTS_FILE
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, SourceUnavailable
from lora_plugins.files import ABSENT, is_inside, map_os_error
from lora_plugins.names import AdapterName
from lora_plugins.resolvers.source import Located

_ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, *PICKLE_FILES)


class FilesystemSource:
    """Adapters below one directory, as vLLM's `VLLM_LORA_RESOLVER_CACHE_DIR` has them.

    A directory is an adapter when it holds any of the files of one; another directory (a folder of adapters) is not.
    """

    label = "filesystem"

    def __init__(self, root: Path, *, follow_symlinks: bool = False, executor: Executor | None = None) -> None:
        self.root = root
        self._follow_symlinks = follow_symlinks
        self._executor = executor

    def __str__(self) -> str:
        return f"{self.label} ({self.root})"

    async def locate(self, name: AdapterName) -> Located | None:
        """Find the adapter's directory; see `Source` for what is raised."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._locate, name)

    def _locate(self, name: AdapterName) -> Located | None:
        if name.revision is not None and "/" in name.revision:
            return None
        directory = self.root / str(name)
        try:
            if not stat.S_ISDIR(os.stat(directory).st_mode):
                return None
            if not self._follow_symlinks and not is_inside(directory, self.root):
                raise InvalidAdapter(
                    "a symlink that leaves the adapter root",
                    expected="a directory below the root",
                    remedy="copy the directory there, or set LORA_PLUGINS_FOLLOW_SYMLINKS=1",
                )
            if not any(os.path.lexists(directory / file) for file in _ADAPTER_FILES):
                # Listing needs the right to read, which `lexists` hides: denied is not the same as absent.
                os.scandir(directory).close()
                return None
        except LoRAPluginsError:
            raise
        except OSError as error:
            if error.errno in ABSENT:
                self._check_root()
                return None
            raise map_os_error(error) from error
        if not os.path.lexists(directory / CONFIG_FILE):
            raise AdapterNotFound(
                "no such file",
                expected="the adapter's configuration",
                remedy="save the adapter again with PEFT",
                file=CONFIG_FILE,
            )
        return Located(name, self.label, directory, None if self._follow_symlinks else self.root)

    def _check_root(self) -> None:
        """A root that is gone (a lost mount) has not said that an adapter does not exist."""
        try:
            if stat.S_ISDIR(os.stat(self.root).st_mode):
                return
        except OSError:
            pass
        raise SourceUnavailable(
            f"no directory at {self.root}",
            expected="the adapter root VLLM_LORA_RESOLVER_CACHE_DIR",
            remedy="mount or create it",
        )
