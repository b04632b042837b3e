"""The filesystem source: the shared contract, and what only a file system can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.absence import Absence
from lora_plugins.adapter.chat import MINOR_FILES, TEMPLATE_FILE, TOOLS_FILE
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.api.access.policy import Policy
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, OutOfMemory, SourceUnavailable
from lora_plugins.resolvers.sources import filesystem, tree
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.source import VersionChanged
from lora_plugins.resolvers.sources.tree import ANYWHERE
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store
from tests.make import CHAT, LAYER, adapter_files, pair, put
from tests.resolvers.sources.contract import (
    SourceContract,
    SourceHarness,
    content,
    locate,
    located,
    obtain,
    turned,
    verify,
)
from tests.virtual_time import run_until_late


class FilesystemHarness(SourceHarness):
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def make_source(self) -> FilesystemSource:
        return FilesystemSource(self.root)

    def put_adapter(self, name: str, files: Mapping[str, bytes]) -> None:
        put(self.root / name, files)

    def break_source(self) -> None:
        self.root.rename(self.root.with_name("gone"))  # a lost mount

    def restore_source(self) -> None:
        self.root.with_name("gone").rename(self.root)


class TestFilesystemSource(SourceContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> FilesystemHarness:
        return FilesystemHarness(tmp_path / "root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def rank(store):
    """Fetch a name and say which adapter came."""
    return lambda source, name="sql": verify(obtain(store, source, located(source, name)).directory)


def tmp_of(store: Store) -> list[str]:
    return os.listdir(store.layout.folder("tmp"))


def test_the_uri_is_the_name_below_the_root(root):
    assert FilesystemSource(root).remote is False, "asking costs no round trip"
    put(root / "team" / "a b%20#?@v2", adapter_files())
    found = located(FilesystemSource(root), "team/a b%20#?@v2")
    assert found.uri == (root / "team" / "a b%20#?@v2").as_uri()
    assert found.uri.endswith("/team/a%20b%2520%23%3F%40v2")


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_dangling_link_is_there_but_broken(root, file):
    # Never None: somebody put it there.
    put(root / "sql", adapter_files())
    (root / "sql" / file).unlink()
    (root / "sql" / file).symlink_to("nowhere")
    with pytest.raises(AdapterNotFound) as caught:
        locate(FilesystemSource(root), "sql")
    assert caught.value.file == file


def test_a_path_longer_than_the_file_system_takes_is_none(root):
    while len(str(root)) < 3850:
        root /= "x" * 100
    root.mkdir(parents=True)
    name = "/".join(["a" * 60] * 4)
    with pytest.raises(OSError, match="too long"):
        os.stat(root / name)
    assert locate(FilesystemSource(root), name) is None


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("empty", "a directory without adapter files"),
        ("notes", "a directory without adapter files"),
        ("file", "a file, not a directory"),
        ("file/x", "no such directory"),
        ("other", "no such directory"),
    ],
)
def test_an_absence_says_what_lies_there_instead(root, name, detail):
    (root / "empty").mkdir()
    put(root / "notes", {"README.md": b"", "loss.csv": b"", "config.json": b"{}", "model.safetensors": b""})
    (root / "file").write_bytes(b"")
    absence = asyncio.run(FilesystemSource(root).locate(AdapterName.parse(name), ""))
    assert (absence.place, absence.detail) == (str(root / name), detail)


@pytest.mark.parametrize(("timeout_s", "look_up_s"), [(5.0, 5), (300.0, 30), (600.0, 60)])
def test_a_mount_that_hangs_ends_at_the_deadline(root, monkeypatch, timeout_s, look_up_s):
    asked, ended, realpath = threading.Event(), threading.Event(), os.path.realpath

    def hang(path, **options):
        if path == str(root):
            asked.set()
            ended.wait(60)
        return realpath(path, **options)

    monkeypatch.setattr(os.path, "realpath", hang)
    locating = FilesystemSource(root, timeout_s=timeout_s).locate(AdapterName("sql"), "")
    try:
        with pytest.raises(SourceUnavailable, match=f"within {look_up_s} s"):
            run_until_late(locating, asked.is_set, 600)
    finally:
        ended.set()


def test_a_copy_that_hangs_ends_at_the_deadline(root, tmp_path, monkeypatch):
    put(root / "sql", adapter_files())
    hung, ended = threading.Event(), threading.Event()

    def hang(source, target, size_bytes):
        hung.set()
        ended.wait(60)
        yield target.write(source.read(size_bytes))

    monkeypatch.setattr(filesystem, "copied", hang)
    source, store = FilesystemSource(root, timeout_s=5.0), Store(tmp_path / "store", fetch_timeout_s=5.0)
    located = asyncio.run(source.locate(AdapterName("sql"), ""))
    fetching = store.obtain(located, lambda download: source.fetch(located, download), lambda _: None)
    try:
        with pytest.raises(SourceUnavailable, match=r"within 5 s.*an answer of the file system"):
            run_until_late(fetching, hung.is_set, 600)
    finally:
        ended.set()
        for thread in threading.enumerate():
            if thread.name == "lora-plugins-filesystem":
                thread.join()
    assert not [path for path in store.layout.folder("tmp").rglob("*") if path.is_file()]
    assert store.layout.temporaries() == []


def test_a_slow_copy_that_goes_on_outlasts_the_deadline(root, tmp_path, monkeypatch):
    put(root / "sql", files := adapter_files())
    copy = os.copy_file_range

    def slow(*arguments):
        time.sleep(0.2)
        return copy(*arguments)

    monkeypatch.setattr(os, "copy_file_range", slow)
    monkeypatch.setattr(filesystem, "_PIECE_BYTES", len(files[WEIGHTS_FILE]) // 10)
    source, began = FilesystemSource(root, timeout_s=1.0), time.monotonic()
    stored = obtain(Store(tmp_path / "store"), source, located(source, "sql"))
    assert content(stored.directory) == files
    assert time.monotonic() - began > 2.0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_denied_files_for_chats_are_no_error():
    code = """
import sys
import tempfile
from pathlib import Path
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from tests.resolvers.sources.contract import located
print(*(file.name for file in located(FilesystemSource(Path(sys.argv[1])), "sql").files))
"""
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        put(Path(home) / "sql", {**adapter_files(), **CHAT})
        (Path(home) / "sql" / TEMPLATE_FILE).chmod(0o600)
        command = [sys.executable, "-c", code, home]
        done = subprocess.run(command, user=54_001, group=54_001, extra_groups=[], capture_output=True, check=True)
    assert {*done.stdout.decode().split()} == {*adapter_files(), *CHAT} - {TEMPLATE_FILE}


# --- symlinks


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return put(tmp_path / "root-outside" / "sql", adapter_files())


@pytest.mark.parametrize("link", ["sql", "team"])
def test_a_directory_symlinked_outside_is_refused_or_followed(root, outside, rank, link):
    """The same answer whether or not there is an adapter behind it."""
    name = "sql" if link == "sql" else "team/sql"
    (root / link).symlink_to(outside if link == "sql" else outside.parent)
    assert rank(FilesystemSource(root, link_roots=[ANYWHERE]), name) == 4
    for _ in range(2):
        with pytest.raises(InvalidAdapter, match=r"leaves the adapter root.*LORA_PLUGINS_LINK_ROOTS"):
            locate(FilesystemSource(root), name)
        for file in outside.iterdir():
            file.unlink()


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_file_symlinked_outside_is_refused_or_followed(root, outside, rank, store, file):
    put(root / "sql", adapter_files())
    (root / "sql" / file).unlink()
    (root / "sql" / file).symlink_to(outside / file)
    with pytest.raises(InvalidAdapter, match="leaves the adapter root") as caught:
        locate(FilesystemSource(root), "sql")
    assert caught.value.file == file
    assert rank(FilesystemSource(root, link_roots=[ANYWHERE])) == 4
    (directory,) = (store.layout.adapter(digest) for digest in store.layout.digests())
    assert not any(path.is_symlink() for path in directory.iterdir())


def test_a_link_where_its_name_may_not_lead_is_absent(root, store):
    put(root / "team-b" / "sql", adapter_files())
    (root / "team-a").mkdir()
    (root / "team-a" / "sql").symlink_to("../team-b/sql")
    asked = []
    source = FilesystemSource(root, may_lead=lambda *link: asked.append(link))
    absence = asyncio.run(source.locate(AdapterName("team-a/sql"), ""))
    assert absence.detail == "a link that leads to 'team-b/sql', which not everybody may use who may use this name"
    assert asked == [("team-a/sql", "team-b/sql")]
    found = located(FilesystemSource(root), "team-a/sql")
    with pytest.raises(VersionChanged):
        obtain(store, source, found)


EXACT = Policy.parse(
    """
    [tenants.team]
    keys = ["key"]
    adapters = ["team/sql"]
    """
)


def projected(volume: Path, files: Mapping[str, bytes]) -> None:
    """Files as Kubernetes writes them into a volume: links to ..data/FILE, and ..data is a link to a dated folder."""
    for file, data in files.items():
        put((volume / "..2026_11_27_10_00_00.1" / file).parent, {Path(file).name: data})
    (volume / "..data").symlink_to("..2026_11_27_10_00_00.1")
    for file in {Path(file).parts[0] for file in files}:
        (volume / file).symlink_to(f"..data/{file}")


@pytest.mark.parametrize("volume", ["team/sql", "."])
def test_a_projected_volume_is_served_under_exact_names(root, rank, volume):
    below = "" if volume == "team/sql" else "team/sql/"
    projected(root / volume, {f"{below}{file}": data for file, data in adapter_files().items()})
    assert rank(FilesystemSource(root, may_lead=EXACT.may_lead), "team/sql") == 4


def test_a_template_for_tools_is_the_adapters_own(root, tmp_path):
    """In a folder of its own; a link to another adapter's is left out."""
    put(root / "team" / "sql", {**adapter_files(), **CHAT})
    source = FilesystemSource(root, may_lead=EXACT.may_lead)
    assert {file.name for file in located(source, "team/sql").files} == {*adapter_files(), *CHAT}
    put(root / "other", {TOOLS_FILE: b"theirs"})
    (root / "team" / "sql" / TOOLS_FILE).unlink()
    (root / "team" / "sql" / TOOLS_FILE).symlink_to(root / "other" / TOOLS_FILE)
    assert {file.name for file in located(source, "team/sql").files} == {*adapter_files(), *CHAT} - {TOOLS_FILE}


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "FIFO"])
def test_no_foreign_side_file_costs_the_adapter(root, outside, kind):
    put(root / "sql", adapter_files())
    for file in MINOR_FILES:
        path = root / "sql" / file
        path.parent.mkdir(exist_ok=True)
        if kind == "directory":
            path.mkdir()
        elif kind == "FIFO":
            os.mkfifo(path)
        else:
            path.symlink_to(outside / CONFIG_FILE if kind == "link" else "nowhere")
    assert {one.name for one in located(FilesystemSource(root), "sql").files} == {*adapter_files()}


@pytest.mark.parametrize("below", ["other/sql", "..2026/other/sql", "team/sql/nested", "team"])
@pytest.mark.parametrize("what", ["files", "directory"])
@pytest.mark.parametrize("where", ["root", "link root"])
def test_a_link_gives_nobody_what_the_policy_does_not(root, tmp_path, below, what, where):
    pvc = tmp_path / "pvc"
    theirs = put((root if where == "root" else pvc) / below, adapter_files())
    own = root / "team" / "sql"
    if what == "directory" and not own.exists():
        own.parent.mkdir(exist_ok=True)
        own.symlink_to(theirs)
    else:
        own.mkdir(parents=True, exist_ok=True)
        for file in adapter_files():
            (own / file).symlink_to(theirs / file)
    source = FilesystemSource(root, may_lead=EXACT.may_lead, link_roots=[pvc])
    absence = asyncio.run(source.locate(AdapterName("team/sql"), ""))
    assert "not everybody may use" in absence.detail


@pytest.mark.parametrize("what", ["files", "directory", "projected"])
def test_a_link_to_a_declared_root_is_served(root, tmp_path, rank, what):
    pvc = tmp_path / "pvc"
    if what == "projected":
        projected(pvc / "team" / "sql", adapter_files())
    theirs = pvc / "team" / "sql" if what == "projected" else put(pvc / "team" / "sql", adapter_files())
    (tmp_path / "link").symlink_to(pvc)  # the operator may name a link
    (root / "team").mkdir()
    if what == "files":
        (root / "team" / "sql").mkdir()
        for file in adapter_files():
            (root / "team" / "sql" / file).symlink_to(theirs / file)
    else:
        (root / "team" / "sql").symlink_to(theirs)
    with pytest.raises(InvalidAdapter, match="LORA_PLUGINS_LINK_ROOTS"):
        locate(FilesystemSource(root, may_lead=EXACT.may_lead), "team/sql")
    source = FilesystemSource(root, may_lead=EXACT.may_lead, link_roots=[tmp_path / "link"])
    assert rank(source, "team/sql") == 4
    assert asyncio.run(source.names("")).names == ("team/sql",)


@pytest.mark.parametrize("place", ["pvc", "outside"])
def test_where_links_lead_anywhere_a_policy_decides_all_the_same(root, tmp_path, rank, place):
    """By the path below the nearest of the link roots."""
    theirs = put(tmp_path / place / "other" / "sql", adapter_files())
    (root / "team").mkdir()
    (root / "team" / "sql").symlink_to(theirs)
    link_roots = [ANYWHERE, tmp_path / "pvc"]
    source = FilesystemSource(root, may_lead=EXACT.may_lead, link_roots=link_roots)
    path = "other/sql" if place == "pvc" else str(theirs)[1:]
    assert f"leads to '{path}'" in asyncio.run(source.locate(AdapterName("team/sql"), "")).detail
    given = FilesystemSource(root, may_lead=lambda *asked: asked == ("team/sql", path), link_roots=link_roots)
    assert rank(given, "team/sql") == 4


def test_without_a_policy_a_declared_root_may_be_an_adapter(root, tmp_path, rank):
    (root / "sql").symlink_to(put(tmp_path / "pvc", adapter_files()))
    assert rank(FilesystemSource(root, link_roots=[tmp_path / "pvc"])) == 4


@pytest.mark.parametrize("target", ["/etc", "/etc/passwd", "pvc-other/sql"])
def test_a_declared_root_opens_nothing_beside_it(root, tmp_path, target):
    put(tmp_path / "pvc-other" / "sql", adapter_files())
    (root / "sql").symlink_to(tmp_path / target)
    with pytest.raises(InvalidAdapter, match="leaves the adapter root"):
        locate(FilesystemSource(root, link_roots=[tmp_path / "pvc"]), "sql")


def test_a_root_that_is_a_symlink_is_a_root(root, tmp_path, rank):
    put(root / "sql", adapter_files())
    (tmp_path / "link").symlink_to(root)
    assert rank(FilesystemSource(tmp_path / "link")) == 4


# A process with mounts of its own, as in a sidecar: copies a directory to where only it sees it, prints, and waits.
SIDECAR = 'mount -t tmpfs none /mnt && mkdir /mnt/models && cp -a "$1"/. /mnt/models && echo there && cat'


@pytest.fixture
def mounted_elsewhere(tmp_path: Path, outside: Path) -> Iterator[str]:
    """A path that only the kernel can follow, /proc/PID/root/mnt/models."""
    put(tmp_path / "models" / "sql-v1", adapter_files())
    (tmp_path / "models" / "sql").symlink_to("/mnt/models/sql-v1")  # as the sidecar sees the place
    (tmp_path / "models" / "stolen").symlink_to(outside)
    command = ["unshare", "-m", "sh", "-c", SIDECAR, "sh", str(tmp_path / "models")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sidecar:
        if sidecar.stdout.readline() != "there\n":
            pytest.skip("this user may not mount")
        yield f"/proc/{sidecar.pid}/root/mnt/models"
        sidecar.stdin.close()


@pytest.mark.parametrize("follow", [False, True])
def test_a_root_in_another_processs_mounts_is_a_root(root, mounted_elsewhere, rank, follow):
    (root / "adapters").symlink_to(mounted_elsewhere)
    source = FilesystemSource(root / "adapters", link_roots=[ANYWHERE] if follow else [])
    if not follow:
        assert rank(source) == 4
        assert asyncio.run(source.names("")).names == ("sql-v1",)
        with pytest.raises(InvalidAdapter, match="leaves the adapter root"):
            locate(source, "stolen")
    assert located(source, "sql-v1")


def test_a_link_to_another_processs_mounts_is_followed_where_allowed(root, mounted_elsewhere):
    (root / "models").symlink_to(mounted_elsewhere)
    assert located(FilesystemSource(root, link_roots=[ANYWHERE]), "models/sql-v1")
    # With a policy the real place decides, which has no path here.
    assert locate(FilesystemSource(root, link_roots=[ANYWHERE], may_lead=lambda *_: True), "models/sql-v1") is None


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_path_exchanged_after_its_check_leads_nowhere(root, outside, store, monkeypatch, what):
    put(root / "sql", adapter_files(lora_alpha=16))
    found = located(FilesystemSource(root), "sql")
    shown, real_place = root / "sql" / (CONFIG_FILE if what == "file" else ""), tree.real_place
    leads_to = outside / shown.relative_to(root / "sql")

    def exchange(root_path, top, below):
        real = real_place(root_path, top, below)
        if below == f"sql/{CONFIG_FILE}" and not shown.is_symlink():
            shown.rename(root / "aside")
            shown.symlink_to(leads_to)
        return real

    monkeypatch.setattr(tree, "real_place", exchange)
    with pytest.raises(InvalidAdapter, match="leaves the adapter root"):
        obtain(store, FilesystemSource(root), found)
    monkeypatch.undo()
    shown.unlink()
    (root / "aside").rename(shown)
    monkeypatch.setattr(tree, "real_place", exchange)
    with pytest.raises(InvalidAdapter, match="leaves the adapter root"):
        locate(FilesystemSource(root), "sql")


# Exchanges two paths until it is ended, each time in one system call (renameat2 with RENAME_EXCHANGE).
EXCHANGE = """
import ctypes, os, sys
one, other = map(os.fsencode, sys.argv[1:])
rename = ctypes.CDLL(None).renameat2
while rename(-100, one, -100, other, 2) == 0:
    pass
"""


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_link_exchanged_in_a_loop_serves_nothing_outside(root, outside, what):
    put(root / "sql", adapter_files(lora_alpha=16))
    path = root / "sql" / (CONFIG_FILE if what == "file" else "")
    (root / "link").symlink_to(outside / path.relative_to(root / "sql"))
    inside = {file.stat().st_ino for file in (root / "sql").iterdir()}
    source, name, seen = FilesystemSource(root), AdapterName("sql"), set()

    async def ask() -> None:
        started = time.monotonic()
        while time.monotonic() - started < 1:
            with contextlib.suppress(LoRAPluginsError):
                found = await source.locate(name, "")
                files = () if isinstance(found, Absence) else found.files
                seen.update(int(file.etag.split("-")[0]) for file in files)

    exchanging = subprocess.Popen([sys.executable, "-c", EXCHANGE, str(path), str(root / "link")])
    try:
        asyncio.run(ask())
    finally:
        exchanging.kill()
        exchanging.wait()
    assert seen <= inside
    assert seen


@pytest.mark.parametrize("follow", [True, False])
def test_a_symlink_loop_is_refused(root, follow):
    (root / "sql").symlink_to("loop")
    (root / "loop").symlink_to("sql")
    with pytest.raises(InvalidAdapter, match="circle"):
        locate(FilesystemSource(root, link_roots=[ANYWHERE] if follow else []), "sql")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_named_pipe_in_a_files_place_does_not_hang(root, store, file):
    put(root / "sql", adapter_files())
    found = located(FilesystemSource(root), "sql")
    (root / "sql" / file).unlink()
    os.mkfifo(root / "sql" / file)
    with pytest.raises(InvalidAdapter, match="not a regular file"):
        locate(FilesystemSource(root), "sql")
    with pytest.raises(InvalidAdapter, match="not a regular file"):
        obtain(store, FilesystemSource(root), found)


# --- a file system that denies or fails


@pytest.mark.parametrize("path", ["team", "team/sql", f"team/sql/{WEIGHTS_FILE}"])
def test_what_may_not_be_read_is_an_outage(root, store, path, permissions_count):
    put(root / "team" / "sql", adapter_files())
    source = FilesystemSource(root)
    (root / path).chmod(0)
    try:
        with pytest.raises(SourceUnavailable, match="Permission denied") as caught:
            obtain(store, source, located(source, "team/sql"))
    finally:
        (root / path).chmod(0o700)
    assert (caught.value.file == WEIGHTS_FILE) is path.endswith(WEIGHTS_FILE)
    assert tmp_of(store) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["open", "listdir"])
def test_a_file_system_that_fails_is_an_outage(root, monkeypatch, code, call):
    (root / "sql").mkdir()

    def fail(path, *_, **__):
        raise OSError(code, os.strerror(code), path)

    # For this module alone: threads of other tests' stores look at files too.
    monkeypatch.setattr(tree, "os", SimpleNamespace(**{**vars(os), call: fail}))
    with pytest.raises(SourceUnavailable, match=os.strerror(code)):
        locate(FilesystemSource(root), "sql")


def test_a_root_that_became_a_file_is_an_outage(root, store):
    put(root / "sql", adapter_files())
    source = FilesystemSource(root)
    found = located(source, "sql")
    shutil.rmtree(root / "sql")
    with pytest.raises(VersionChanged, match="is gone"):
        obtain(store, source, found)
    root.rmdir()
    root.write_bytes(b"")
    with pytest.raises(SourceUnavailable, match="no directory"):
        locate(source, "sql")


# --- the snapshot


def test_a_snapshot_shares_no_file_with_its_source(root, store):
    put(root / "sql", adapter_files())
    source = FilesystemSource(root)
    stored = obtain(store, source, located(source, "sql"))
    for name in adapter_files():
        assert os.stat(stored.directory / name).st_nlink == 1
        assert not os.path.samefile(stored.directory / name, root / "sql" / name)


@pytest.mark.parametrize("code", sorted(filesystem._NO_KERNEL_COPY))
def test_files_are_copied_where_the_kernel_cannot(root, rank, monkeypatch, code):
    monkeypatch.setattr(filesystem.os, "copy_file_range", Mock(side_effect=OSError(code, os.strerror(code))))
    put(root / "sql", adapter_files())
    assert rank(FilesystemSource(root)) == 4


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [(errno.EIO, SourceUnavailable, "Input/output error"), (errno.ENOSPC, OutOfMemory, "LORA_PLUGINS_STORE_DIR")],
)
def test_an_error_halfway_through_a_kernel_copy_is_raised(root, store, monkeypatch, code, kind, says):
    real = os.copy_file_range
    calls = []

    def break_off(source, target, count, *offsets):
        calls.append(offsets)
        if len(calls) > 1:
            raise OSError(code, os.strerror(code))
        return real(source, target, 10, *offsets)

    monkeypatch.setattr(filesystem.os, "copy_file_range", break_off)
    put(root / "sql", adapter_files())
    source = FilesystemSource(root)
    with pytest.raises(kind, match=says):
        obtain(store, source, located(source, "sql"))
    assert tmp_of(store) == []


@pytest.mark.parametrize("kernel", [True, False])
def test_what_has_landed_is_reported_while_copying(root, tmp_path, monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(filesystem, "_NO_KERNEL_COPY", {errno.EXDEV, errno.EINVAL})
        monkeypatch.setattr(filesystem.os, "copy_file_range", Mock(side_effect=OSError(errno.EXDEV, "other device")))
    monkeypatch.setattr(filesystem, "_PIECE_BYTES", 1000)
    put(root / "sql", adapter_files(pair(LAYER.format(0, "q_proj"), 4, 200_000, 8)))
    source = FilesystemSource(root)
    found = located(source, "sql")
    reported: dict[str, list[int]] = {}
    (tmp_path / "arriving").mkdir()
    arriving = PartialDownload(tmp_path / "arriving", [file.name for file in found.files])
    arriving.landed = lambda name, done: reported.setdefault(name, []).append(done)
    asyncio.run(source.fetch(found, arriving))
    for file in found.files:
        assert reported[file.name] == sorted(set(reported[file.name]))
        assert reported[file.name][-1] == file.size_bytes
    assert len(reported[WEIGHTS_FILE]) >= 4


@pytest.mark.parametrize(("grain_s", "gap_s"), [(2.0, 0.3), (0.01, 0.0)])
def test_a_version_has_the_last_bytes_of_its_grain(tmp_path, store, monkeypatch, grain_s, gap_s):
    """Linux before 6.13 has a grain of 1 to 10 ms, older NFS servers have 1 s, FAT has 2 s."""
    grain_ns = int(grain_s * 1e9)
    exact = os.fstat

    def coarse(number: int) -> os.stat_result:
        status = exact(number)
        times = {name: getattr(status, name) // grain_ns * grain_ns for name in ("st_mtime_ns", "st_ctime_ns")}
        return os.stat_result(tuple(status), times)

    monkeypatch.setattr(os, "fstat", coarse)
    put(tmp_path / "sql", adapter_files())
    source = FilesystemSource(tmp_path)
    weights = tmp_path / "sql" / WEIGHTS_FILE

    def write(last: bytes) -> None:
        with weights.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(last)

    for _ in range(30):  # until all of this falls into one grain of the clock
        while time.time_ns() % grain_ns > grain_ns / 4:
            time.sleep(grain_s / 100)
        weights.write_bytes(weights.read_bytes())
        before = locate(source, "sql")
        time.sleep(gap_s)
        write(b"\x3e")
        if locate(source, "sql").version == before.version:
            break
    assert locate(source, "sql").version == before.version
    stored = obtain(store, source, before)
    assert content(stored.directory) == content(tmp_path / "sql")
    write(b"\x3d")
    assert locate(source, "sql").version != before.version


CHANGES = {
    "replaced": lambda weights: os.replace(put(weights.parent.parent / "new", turned()) / WEIGHTS_FILE, weights),
    "overwritten in place": lambda weights: weights.write_bytes(turned()[WEIGHTS_FILE]),
    "grown": lambda weights: weights.write_bytes(weights.read_bytes() + b"more"),
    "truncated": lambda weights: os.truncate(weights, 100),
    "deleted": os.unlink,
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_while_copied_is_a_version_change(root, store, monkeypatch, how):
    put(root / "sql", adapter_files())
    source = FilesystemSource(root)
    found = located(source, "sql")
    copy = filesystem.copied

    def change_halfway(opened, target, size_bytes):
        for done in copy(opened, target, size_bytes):
            if target.name.endswith(WEIGHTS_FILE):
                CHANGES[how](root / "sql" / WEIGHTS_FILE)
            yield done

    monkeypatch.setattr(filesystem, "copied", change_halfway)
    with pytest.raises(VersionChanged, match="being written"):
        obtain(store, source, found)
    assert store.layout.digests() == []
    assert tmp_of(store) == []


# --- nothing leaves the root


SPELLINGS = st.text(st.sampled_from("abs./@\\ %2e~q"), min_size=1, max_size=12)


@given(spelling=st.one_of(SPELLINGS, st.text(max_size=20)))
def test_no_name_reaches_an_adapter_outside(tmp_path, spelling):
    root = tmp_path / "root"
    if not root.exists():
        for inside in ("a", "team/sql"):
            put(root / inside, adapter_files())
        for beside in ("a", "s", "sql", "root-outside/sql"):
            put(tmp_path / beside, adapter_files())
    try:
        name = AdapterName.parse(spelling)
        found = asyncio.run(FilesystemSource(root).locate(name, ""))
    except LoRAPluginsError:
        return
    if not isinstance(found, Absence):
        directory = unquote(found.uri.removeprefix("file://"))
        assert os.path.relpath(os.path.realpath(directory), root) == spelling


def test_a_version_is_the_same_on_each_host(tmp_path: Path) -> None:
    """Each host and remount gives a shared file system another number of a device; each copied all adapters again."""
    (tmp_path / "file").write_bytes(b"x")
    seen = os.stat(tmp_path / "file")
    names = [name for name in dir(seen) if name.startswith("st_")]
    elsewhere = SimpleNamespace(**{name: getattr(seen, name) for name in names} | {"st_dev": seen.st_dev + 1})
    assert filesystem._etag(elsewhere) == filesystem._etag(seen)
    (tmp_path / "file").write_bytes(b"xy")
    assert filesystem._etag(os.stat(tmp_path / "file")) != filesystem._etag(seen)


@pytest.mark.parametrize(
    ("file", "found", "remedy"),
    [
        ("adapters.npz", "MLX's form", "mlx_lm.fuse"),
        ("iter_500.pth", "xtuner's checkpoints", "pth_to_hf"),
        ("pytorch_model_fsdp_0/.metadata", "shards of FSDP", "merge-weights"),
        ("default/adapter_config.json", "a folder for each adapter", "'/default'"),
    ],
)
def test_an_absence_names_the_program_whose_files_lie_there(root, file, found, remedy):
    """What accelerate and xtuner save is in testbed/trainers/table.py."""
    (root / "sql" / file).parent.mkdir(parents=True)
    (root / "sql" / file).write_bytes(b"x")
    absence = asyncio.run(FilesystemSource(root).locate(AdapterName("sql"), ""))
    assert isinstance(absence, Absence)
    assert (absence.detail, absence.hint) == (absence.cause.found, absence.cause.remedy)
    assert (absence.cause.adapter, absence.cause.file) == ("sql", CONFIG_FILE)
    assert found in absence.detail
    assert remedy in absence.hint


def test_a_folder_elsewhere_is_not_looked_into(root, tmp_path):
    put(tmp_path / "other", {CONFIG_FILE: b"{}"})
    (root / "sql").mkdir()
    (root / "sql" / "default").symlink_to(tmp_path / "other")
    absence = asyncio.run(FilesystemSource(root).locate(AdapterName("sql"), ""))
    assert (absence.detail, absence.cause) == ("a directory without adapter files", None)
