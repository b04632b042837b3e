"""A store and several users of the machine: each runs in a process of its own, with its uid, group and umask."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import Settings
from lora_plugins.store.store import Store, open_store
from tests.other_processes import other_processes
from tests.store.common import DownloadSpec, adapter_files, obtain

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")

ANNA, BEN, GROUP, SEEDS = 54_001, 54_002, 54_100, range(3)


@pytest.fixture
def root() -> Iterator[Path]:
    """A store's root in a folder where everybody may write, as in /tmp."""
    home = Path(tempfile.mkdtemp())
    home.chmod(0o1777)
    yield home / "store"
    shutil.rmtree(home)


def fetch(root: Path, user: int, *seeds: int, group: int | None = None, umask: int = 0o022) -> str:
    """What a user gets who asks the store for adapters, then removes one if nobody else uses it."""
    with other_processes() as process:
        return process.submit(fetch_as, user, user if group is None else group, umask, root, seeds).result(240)


def fetch_as(user: int, group: int, umask: int, root: Path, seeds: tuple[int, ...]) -> str:
    with tempfile.TemporaryDirectory() as of_root:
        obtain(Store(Path(of_root)), DownloadSpec(adapter_files()))  # imports what the user may have no right to read
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    os.umask(umask)
    try:
        store = open_store(Settings(store_dir=root))
        for seed in seeds:
            stored = obtain(store, DownloadSpec(adapter_files(seed=seed), version=f"{seed}"))
            assert store.verify(stored.digest)
        return "removed" if store.remove(store.layout.digests()[0]) else "leased"
    except LoRAPluginsError as error:
        return str(error)


@pytest.mark.deployment(
    "store shared by two users", "refused", "umask 022: L007 to the second, root too; no adapter fails later"
)
def test_another_users_store_is_refused_at_start(root: Path) -> None:
    assert fetch(root, ANNA, 0) == "leased"
    for user, found in (
        (BEN, "that answers 'Permission denied'"),
        (0, f"which belongs to user {ANNA}"),
    ):
        refused = fetch(root, user, 1, 2)
        assert refused.startswith("[L007]")
        assert found in refused
        assert "set LORA_PLUGINS_STORE_DIR" in refused
        assert "by a group: lora-plugins explain L007" in refused
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
    root.chmod(0o1777)
    assert fetch(root, ANNA, *SEEDS) == "leased"
    assert fetch(root, ANNA, *SEEDS) == "leased"


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_a_root_that_another_user_made_is_refused(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    os.chown(root, BEN, BEN)
    for user in (0, ANNA):
        refused = fetch(root, user, 0)
        may_write = user == 0 or mode == 0o1777
        assert (f"which belongs to user {BEN}" if may_write else "that answers 'Permission denied'") in refused
        assert refused.startswith("[L007]")
    assert list(root.iterdir()) == []


def test_another_groups_root_needs_umask_002(root: Path) -> None:
    root.mkdir()
    os.chown(root, BEN, GROUP)
    root.chmod(0o2775)
    assert f"which belongs to user {BEN}" in fetch(root, ANNA, 0, group=GROUP)
    assert fetch(root, ANNA, 0, group=GROUP, umask=0o002) == "leased"


def test_a_parent_of_another_user_is_refused(root: Path) -> None:
    root.mkdir()
    os.chown(root, BEN, BEN)
    root.chmod(0o777)
    (root / "mine").mkdir()
    os.chown(root / "mine", ANNA, ANNA)
    assert f"a store below {root}, which belongs to user {BEN}" in fetch(root / "mine", ANNA, 0)


def test_a_link_of_another_user_is_refused(root: Path) -> None:
    root.symlink_to(tempfile.mkdtemp(dir=root.parent))
    os.chown(root.resolve(), ANNA, ANNA)
    os.chown(root, BEN, BEN, follow_symlinks=False)
    assert f"a store below {root}, which belongs to user {BEN}" in fetch(root, ANNA, 0)
    os.chown(root, ANNA, ANNA, follow_symlinks=False)
    assert fetch(root, ANNA, 0) == "leased"


def test_a_folder_where_everybody_may_rename_is_refused(root: Path) -> None:
    root.parent.chmod(0o777)
    refused = fetch(root, ANNA, 0)
    assert f"a store below {root.parent}, where every user may exchange it" in refused
    assert f"chmod o-w {root.parent}" in refused
    root.parent.chmod(0o1777)
    assert fetch(root, ANNA, 0) == "leased"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o700), (0o077, 0o700), (0o027, 0o700), (0o002, 0o775)])
def test_a_new_root_is_closed_unless_its_group_shares_it(root: Path, umask: int, mode: int) -> None:
    assert fetch(root, ANNA, 0, umask=umask) == "leased"
    assert root.stat().st_mode & 0o777 == mode
