"""A server that another host takes for dead, since its machine stood still (SIGSTOP), and that goes on."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from lora_plugins.store import processes
from lora_plugins.store.processes import SILENT_S, Processes
from lora_plugins.store.store import Store
from testbed.bed import Bed
from testbed.client import connect
from tests.e2e.admin import Admin, serving
from tests.store.common import make_room_for_one

FROZEN_S = SILENT_S / 2 + 2  # from half the time on, a process takes itself for one that others may take for dead


def test_a_frozen_server_has_again_what_is_gone(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_host", lambda: "another-host")
    monkeypatch.setitem(Processes.__init__.__kwdefaults__, "silent_s", SILENT_S / 2)
    for name in ("sql", "chat"):
        shutil.copytree(bed.adapters / name, tmp_path / "adapters" / name)
    with serving(bed, tmp_path, LORA_PLUGINS_PRELOAD="sql,chat") as server:
        admin = Admin(server, connect(server), bed, tmp_path / "adapters", tmp_path)
        sql, chat = (admin.view(name)["digest"] for name in ("sql", "chat"))
        store = Store(tmp_path / "store")
        holders = store.leases.holders(chat)
        assert store.leases.holders(sql) == holders != []
        os.utime(store.layout.folder("uses") / sql, (1, 1))
        os.killpg(server.process.pid, signal.SIGSTOP)
        try:
            time.sleep(FROZEN_S)
            assert store.leases.holders(sql) == []
            make_room_for_one(Store(tmp_path / "store"))
            assert (store.layout.adapter(sql).exists(), store.layout.adapter(chat).exists()) == (False, True)
        finally:
            os.killpg(server.process.pid, signal.SIGCONT)
        admin.answers_like("sql", "sql")
        assert store.layout.adapter(sql).is_dir(), "fetched again, before the engine could read it"
        assert store.leases.holders(sql) == store.leases.holders(chat) == holders
        admin.answers_like("chat", "chat")
