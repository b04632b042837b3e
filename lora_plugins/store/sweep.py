"""Remove files and directories that dead processes have left in a store.

Runs in each process that opens a store: all of it once at the start, temporary files again before each fetch makes
room, because the room that a dead process has announced is free. A process is judged by `processes.py`; what a living
process has stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading

from lora_plugins.store.inventory import Inventory
from lora_plugins.store.layout import Layout
from lora_plugins.store.leases import Leases
from lora_plugins.store.locks import remove_unheld
from lora_plugins.store.processes import Processes

_SWEPT_AT_ONCE = 1_000  # entries of the folder of leases


def sweep(layout: Layout, processes: Processes, leases: Leases, inventory: Inventory) -> None:
    """Sweep a store that this process opens; the leases of a large store in a thread, after the call."""
    sweep_temporaries(layout, processes)
    for lock in layout.folder("locks").glob("*.fetch"):
        remove_unheld(lock)
    for folder in ("parts", "quarantine"):  # of earlier versions, which list the folders
        for entry in layout.folder(folder).glob("*"):
            shutil.rmtree(entry, ignore_errors=True)
    processes.sweep()

    def sweep_leases() -> None:
        with contextlib.suppress(OSError):  # the store is away; the next process to open the store sweeps
            # Both are slow in a large store, so neither the start nor the first fetch waits for them.
            inventory.look()
            inventory.order()
            leases.sweep()

    # Each use asks whether a lease's process lives, so leases of the dead keep nothing and may be swept later.
    if len(os.listdir(layout.folder("leases"))) <= _SWEPT_AT_ONCE:
        leases.sweep()
    else:
        threading.Thread(target=sweep_leases, daemon=True, name="lora-plugins-open").start()


def sweep_temporaries(layout: Layout, processes: Processes) -> None:
    """Remove temporary files and directories of dead processes."""
    for temporary in layout.temporaries():
        if processes.is_gone(temporary.process):
            if temporary.path.is_dir():
                shutil.rmtree(temporary.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    temporary.path.unlink()
