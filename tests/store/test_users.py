"""A store and several users of the machine: each runs in a process of its own, with its uid, group and umask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")

ANNA, BEN, GROUP, SEEDS = 54_001, 54_002, 54_100, range(3)
CODE = """
import sys
from pathlib import Path
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import Settings
from lora_plugins.store.opening import open_store
from tests.store.common import DownloadSpec, adapter_files, obtain
try:
    store = open_store(Settings(store_dir=Path(sys.argv[1])))
    for seed in map(int, sys.argv[2:]):
        stored = obtain(store, DownloadSpec(adapter_files(seed=seed), version=f"{seed}"))
        assert store.verify(stored.digest)
    print("removed" if store.remove(store.layout.digests()[0]) else "leased")
except LoRAPluginsError as error:
    print(error)
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A store's root in a folder where everybody may write, and that everybody may enter."""
    home = Path(tempfile.mkdtemp())
    home.chmod(0o777)
    yield home / "store"
    shutil.rmtree(home)


def fetch(root: Path, user: int, *seeds: int, group: int | None = None, umask: int = 0o022) -> str:
    """What a user gets who asks the store for adapters, then removes one if nobody else uses it."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(root), *map(str, seeds)],
        user=user,
        group=user if group is None else group,
        extra_groups=[],
        umask=umask,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.deployment(
    "store shared by two users", "refused", "umask 022: L007 to the second, root too; no adapter fails later"
)
def test_another_users_store_is_refused_at_start(root: Path) -> None:
    assert fetch(root, ANNA, 0) == "leased"
    for user, found in (
        (BEN, "that answers 'Permission denied'"),
        (0, f"a store of user {ANNA}, who could not change"),
    ):
        refused = fetch(root, user, 1, 2)
        assert refused.startswith("[L007]")
        assert found in refused
        assert "set LORA_PLUGINS_STORE_DIR" in refused
        assert "by a group (docs/operate/store.md)" in refused
    assert fetch(root, ANNA, *SEEDS) == "leased"


@pytest.mark.deployment(
    "store shared by two users", "tested", "umask 002 and a common group: each uses and removes what others fetched"
)
def test_users_of_one_group_share_a_store(root: Path) -> None:
    root.mkdir()
    os.chown(root, 0, GROUP)
    root.chmod(0o2775)
    shared = {"group": GROUP, "umask": 0o002}
    for user in (ANNA, BEN, ANNA, 0):
        assert fetch(root, user, *SEEDS, **shared) == "leased"
    assert fetch(root, BEN, **shared) == "removed"
    assert fetch(root, ANNA, *SEEDS, **shared) == "leased"
    assert "[L007]" in fetch(root, BEN, *SEEDS, group=GROUP, umask=0o022)


def test_what_root_makes_for_everybody_is_taken(root: Path) -> None:
    """As in containers, where root makes the folder of a volume for whoever runs there."""
    root.mkdir()
    root.chmod(0o777)
    assert fetch(root, ANNA, *SEEDS) == "leased"
    assert fetch(root, ANNA, *SEEDS) == "leased"
