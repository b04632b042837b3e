"""On a real server: a flipped bit under a served adapter heals, and twelve names are served from room for four."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.bed import Bed
from testbed.client import connect
from tests.e2e.admin import KEY, Admin
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import seen

ORIGINALS = ("sql", "chat", "stable")
NAMES = {f"tenant-{number}": ORIGINALS[number % len(ORIGINALS)] for number in range(12)}
WEIGHTS = "adapter_model.safetensors"


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def room_of(bed: Bed) -> int:
    """For four of the largest."""
    return 4 * max(size_of(bed.adapters / name) + 1000 for name in ORIGINALS)


@pytest.fixture(scope="module")
def admin(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    home = tmp_path_factory.mktemp("damaged")
    root, allowed = home / "adapters", home / "allowed"
    shutil.copytree(bed.adapters / "sql", root / "sql")
    arguments = ("--max-loras", "2", "--max-cpu-loras", "2", "--api-key", KEY)
    with admin_server(bed, home, *arguments, LORA_PLUGINS_STORE_MAX_BYTES=f"{room_of(bed)}") as server:
        yield Admin(server, connect(server), bed, root, allowed)


def flip(path: Path, *, as_disks_do: bool = False) -> None:
    """Make one weight 256 times as large, or as small; `as_disks_do` leaves the time of the last change as it is."""
    times, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 0x04
    path.chmod(0o600)
    path.write_bytes(data)
    if as_disks_do:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def verify(admin: Admin) -> subprocess.CompletedProcess[str]:
    store = admin.root.parent / "store"
    return subprocess.run(
        [sys.executable, "-c", "from lora_plugins.cli import main; main()", "verify"],
        env={**os.environ, "LORA_PLUGINS_STORE_DIR": str(store)},
        capture_output=True,
        text=True,
        check=False,
    )


def healed(admin: Admin, engine_path: str) -> None:
    async def is_loaded_again() -> bool:
        return bool((await asyncio.to_thread(admin.view, "sql"))["path"] != engine_path)

    asyncio.run(seen(is_loaded_again))


def test_a_flipped_bit_under_a_served_adapter_heals(admin: Admin) -> None:
    admin.answers_like("sql", "sql")
    before = admin.view("sql")
    stored = admin.root.parent / "store" / before["digest"] / WEIGHTS
    for name in ("other", "another"):  # they take its place in host memory: it is read again
        admin.publish(name, "chat", len(name))
        admin.answers_like(name, "chat")
    flip(stored)
    admin.ask("sql")  # with whatever the engine reads now, which the prefix cache keeps
    healed(admin, before["path"])
    for _ in range(3):
        admin.answers_like("sql", "sql")
    after = admin.view("sql")
    assert after["digest"] == before["digest"]
    assert after["last_error"] is None
    assert stored.read_bytes() == (admin.root / "sql" / WEIGHTS).read_bytes()
    assert "lora_plugins_store_damaged_total 1.0" in admin.call("GET", "/metrics").text


def test_what_verify_finds_damaged_reaches_the_server(admin: Admin) -> None:
    admin.answers_like("sql", "sql")
    before = admin.view("sql")
    stored = admin.root.parent / "store" / before["digest"] / WEIGHTS
    flip(stored, as_disks_do=True)
    assert "damaged: replaced once" in verify(admin).stdout
    healed(admin, before["path"])
    admin.answers_like("sql", "sql")
    assert verify(admin).returncode == 0
    assert not admin.done("POST", "/v1/loras/sql/refresh")["swapped"]
    flip(stored, as_disks_do=True)
    verify(admin)
    refreshed = admin.done("POST", "/v1/loras/sql/refresh")
    assert refreshed["digest"] == before["digest"]
    admin.answers_like("sql", "sql")
    assert stored.read_bytes() == (admin.root / "sql" / WEIGHTS).read_bytes()


def test_twelve_names_are_served_from_room_for_four(admin: Admin) -> None:
    for number, (name, original) in enumerate(NAMES.items()):
        admin.publish(name, original, number)
    for _ in range(2):
        for name, original in NAMES.items():
            admin.answers_like(name, original)
    served = {view["lora_name"] for view in admin.done("GET", "/v1/loras")["loras"]}
    assert set(NAMES) <= served
    assert 1 <= sum("store" in admin.view(name)["tiers"] for name in NAMES) < len(NAMES)
    stored = sum(size_of(entry) for entry in (admin.root.parent / "store").iterdir() if len(entry.name) == 64)
    assert stored <= room_of(admin.bed) + 10_000, "its manifests aside"
