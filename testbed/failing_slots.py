"""A plugin of vLLM's for tests: on one worker, one adapter's slots cannot be written while a file says so."""

from __future__ import annotations

import os
from pathlib import Path

NAME, VARIABLE = "failing_slots", "FAILING_SLOTS"


def environment(home: Path) -> dict[str, str]:
    """Have a server's processes find the plugin, installed in `home`; `home / VARIABLE` holds "RANK ADAPTER"."""
    metadata = home / f"{NAME}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:register\n")
    paths = (str(home), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    return {VARIABLE: str(home / VARIABLE), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def register() -> None:
    """Have this process's workers read the file before each write."""
    from torch import distributed

    from lora_plugins.worker.loaded_adapter import LoadedAdapter

    file, write = Path(os.environ[VARIABLE]), LoadedAdapter.write

    def failing(self: LoadedAdapter, slot: int) -> None:
        if file.exists() and file.read_text() == f"{distributed.get_rank()} {self.name}":
            raise MemoryError("no room for the copy")
        write(self, slot)

    LoadedAdapter.write = failing  # type: ignore[method-assign]
