"""What the store's file system answers becomes an error of ours."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_plugins.errors import OutOfMemory, SourceUnavailable
from lora_plugins.store.disk_errors import is_damage
from lora_plugins.store.store import Store
from tests.other_processes import other_processes
from tests.store.common import DownloadSpec, adapter_files, leftovers, obtain


@pytest.mark.deployment("store on an unmounted file system", "tested", "a fetch into it: L006")
@pytest.mark.parametrize("folder", ["index", "leases", "tmp", "locks"])
def test_a_store_whose_folder_is_lost_is_unavailable(store: Store, folder: str) -> None:
    shutil.rmtree(store.layout.folder(folder))
    store.layout.folder(folder).write_bytes(b"in the way")
    with pytest.raises(SourceUnavailable, match="LORA_PLUGINS_STORE_DIR"):
        obtain(store, DownloadSpec(adapter_files()))


@pytest.mark.deployment("store on a read-only file system", "tested", "a fetch into it: L006")
def test_a_store_that_becomes_read_only_is_unavailable(store: Store, permissions_count: None) -> None:
    store.layout.folder("tmp").chmod(0o500)
    with pytest.raises(SourceUnavailable, match="Permission denied"):
        obtain(store, DownloadSpec(adapter_files()))
    store.layout.folder("tmp").chmod(0o700)
    assert obtain(store, DownloadSpec(adapter_files())).fetched


@pytest.mark.deployment("full disk", "tested", "at every page of a fetch, by quota too: L004, nothing half is left")
def test_a_full_disk_is_out_of_memory_and_passes(few_bytes: Path) -> None:
    store = Store(few_bytes / "store", max_bytes=1 << 50)
    kept = obtain(store, DownloadSpec(adapter_files(), version="kept"))
    large = DownloadSpec(adapter_files(rank=16, hidden=16_384), version="large")
    with pytest.raises(OutOfMemory, match="full disk"):
        obtain(store, large)
    assert leftovers(store) == []
    assert store.layout.digests() == [kept.digest]
    assert store.verify(kept.digest)
    assert obtain(store, DownloadSpec(adapter_files(seed=1), version="small")).fetched
    subprocess.run(["mount", "-o", "remount,size=8m", str(few_bytes)], check=True)
    assert obtain(store, large).fetched


@pytest.mark.deployment("full disk", "tested", "at every page of a fetch, by quota too: L004, nothing half is left")
@pytest.mark.parametrize("free", [0, 1, 2, 3, 5, 8, 13])
def test_a_disk_that_fills_leaves_no_half_adapter(few_bytes: Path, free: int) -> None:
    # At first with no page left, then with a few: something of the store's own work fails, whatever it is.
    store = Store(few_bytes / "store", max_bytes=1 << 50)
    wanted = DownloadSpec(adapter_files())
    filler = few_bytes / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, max(0, filler.stat().st_size - free * 4096))
    try:
        stored = obtain(store, wanted)
    except OutOfMemory:
        assert store.layout.digests() == []
        assert leftovers(store) == []
    else:
        assert store.verify(stored.digest)
    filler.unlink()
    stored = obtain(store, wanted)
    assert store.verify(stored.digest)
    assert leftovers(store) == []


def fetch_limited(root: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    obtain(Store(root), DownloadSpec(adapter_files(rank=16, hidden=4096)))


@pytest.mark.deployment("full disk", "tested", "at every page of a fetch, by quota too: L004, nothing half is left")
def test_a_file_larger_than_allowed_is_out_of_memory(tmp_path: Path) -> None:
    # Where nothing can be mounted: the limit on a file's size fails a write in the same way.
    with other_processes() as process, pytest.raises(OutOfMemory):
        process.submit(fetch_limited, tmp_path / "store").result(240)
    assert leftovers(Store(tmp_path / "store")) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 50_000


@pytest.mark.deployment("full disk", "tested", "at every page of a fetch, by quota too: L004, nothing half is left")
def test_a_filesystem_source_may_fill_the_disk(few_bytes: Path, tmp_path: Path) -> None:
    from lora_plugins.resolvers.sources.filesystem import FilesystemSource
    from tests.make import put
    from tests.resolvers.sources.contract import located
    from tests.resolvers.sources.contract import obtain as obtain_from

    put(tmp_path / "adapters" / "sql", adapter_files(rank=16, hidden=16_384))
    source = FilesystemSource(tmp_path / "adapters")
    store = Store(few_bytes / "store", max_bytes=1 << 50)
    with pytest.raises(OutOfMemory, match="LORA_PLUGINS_STORE_DIR"):
        obtain_from(store, source, located(source, "sql"))
    assert leftovers(store) == []


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened in this process: EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


ASKED = {
    "verify": lambda store, digest: store.verify(digest),
    "is_sound": lambda store, digest: store.is_sound(digest, max_age_s=0.0),
    "acquire": lambda store, digest: store.acquire(digest, "other"),
    "acquire_sound": lambda store, digest: store.acquire_sound(digest, "other"),
    "find": lambda store, _: store.find_leased("test://adapter", "v1", adapter_files(), "other"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_read_error_damages_nothing(store: Store, asked: str) -> None:
    stored = obtain(store, DownloadSpec(adapter_files()))
    store.release("", stored.directory)
    damaged: list[str] = []
    store.on_damage = damaged.append
    assert store.verify(stored.digest)
    with no_descriptors(), pytest.raises(SourceUnavailable, match="Too many open files"):
        ASKED[asked](store, stored.digest)
    assert (damaged, store.is_marked(stored.digest), list(store.leases.holders(stored.digest))) == ([], False, [])
    assert store.verify(stored.digest)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "manifest.json"])
@pytest.mark.parametrize("made", ["nothing", "a directory", "a circle"])
def test_what_is_no_file_is_damage(store: Store, file: str, made: str) -> None:
    stored = obtain(store, DownloadSpec(adapter_files()))
    path = stored.directory / file
    path.unlink()
    if made == "a directory":
        path.mkdir()
    elif made == "a circle":
        path.symlink_to(path)
    assert not store.verify(stored.digest)
    assert store.is_marked(stored.digest)


FAULTS = ("EMFILE", "ENFILE", "ESTALE", "EIO", "EACCES", "ENOMEM", "ETIMEDOUT")


@pytest.mark.parametrize("name", FAULTS)
def test_only_other_bytes_or_none_are_damage(name: str) -> None:
    assert not is_damage(OSError(getattr(errno, name), name))
    assert is_damage(FileNotFoundError(errno.ENOENT, "gone"))
