"""A host that was silent (SIGSTOP): its leases hold while no room is needed, and it believes in no lost one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_plugins.errors import OutOfMemory
from lora_plugins.store.processes import Processes
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, is_soon, make_room_for_one, obtain

SILENT_S, BEAT_S = 1.0, 0.1
# Another host's process with our times, which evaluates what it is told, with a lease of its own of the adapter.
OTHER_HOST = f"""
import os, sys
from pathlib import Path
from lora_plugins.store import processes
from tests.store.common import DownloadSpec, adapter_files, obtain
processes._host = lambda: "otherhost"
processes.Processes.__init__.__kwdefaults__.update(silent_s={SILENT_S}, beat_s={BEAT_S})
from lora_plugins.store.store import Store
store, digest = Store(Path(sys.argv[1])), sys.argv[2]
path = str(store.layout.adapter(digest))
assert store.leases.acquire(digest, "name")
print(store.processes.me(), flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


@dataclass
class OtherHost:
    """A process that this one takes for another host's."""

    process: subprocess.Popen[str]
    name: str

    def says(self, expression: str) -> str:
        print(expression, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def shares(self, holder: str = "request") -> bool:
        """Whether the process has a lease for a request, soon: on a busy machine it may just have been silent again."""
        return is_soon(lambda: self.says(f"store.share(path, {holder!r})") == "True")

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(SILENT_S + 3 * BEAT_S)
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("silent_s", SILENT_S), ("beat_s", BEAT_S)):
        monkeypatch.setitem(Processes.__init__.__kwdefaults__, name, value)


@pytest.fixture
def store(short_times: None, tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def digest(store: Store) -> str:
    digest = obtain(store, DownloadSpec(adapter_files())).digest
    store.leases.release(digest)
    return digest


@pytest.fixture
def other(store: Store, digest: str) -> Iterator[OtherHost]:
    command = [sys.executable, "-c", OTHER_HOST, str(store.layout.root), digest]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        host = OtherHost(process, process.stdout.readline().strip())
        assert host.name.startswith("otherhost.")
        yield host
        process.kill()


def test_silence_alone_takes_no_lease(store: Store, digest: str, other: OtherHost) -> None:
    with other.frozen():
        assert store.leases.holders(digest) == []
        Store(store.layout.root)  # as a server that starts meanwhile, or a command
    assert is_soon(lambda: store.leases.holders(digest) == [other.name])
    assert other.shares()
    assert not store.remove(digest)


def test_a_host_that_wakes_asserts_its_leases_again(store: Store, digest: str, other: OtherHost) -> None:
    with other.frozen():
        (store.layout.folder("leases") / digest / other.name).unlink()
        (store.layout.folder("processes") / other.name).unlink()
    assert is_soon(lambda: store.leases.holders(digest) == [other.name])
    assert other.shares()


def test_what_went_in_a_silence_is_known_to_be_gone(store: Store, digest: str, other: OtherHost) -> None:
    assert other.shares("request before")
    with other.frozen():
        with pytest.raises(OutOfMemory):
            store.evictor.make_room(10**18, 10**19)
        assert store.layout.adapter(digest).is_dir()
        make_room_for_one(store)
        assert not store.layout.adapter(digest).exists()
    assert other.says("store.is_leased('name', store.layout.adapter(digest))") == "False"
    assert other.says("store.share(path, 'request')") == "False"
    assert other.says("store.acquire(digest, 'name')") == "None"
    assert other.says("store.share(path, 'request')") == "False", "a request from before the silence still has its hold"
    assert other.says("obtain(store, DownloadSpec(adapter_files())).digest == digest") == "True"
    assert other.shares()
    assert store.leases.holders(digest) == [other.name]
    assert not store.remove(digest)


def test_what_nobody_leases_goes_before_what_a_silent_host_leases(store: Store, digest: str, other: OtherHost) -> None:
    newer = obtain(store, DownloadSpec(adapter_files(seed=1), version="v2")).digest
    store.leases.release(newer)
    os.utime(store.layout.folder("uses") / digest, (1, 1))
    with other.frozen():
        make_room_for_one(store)
        assert (store.layout.adapter(digest).exists(), store.layout.adapter(newer).exists()) == (True, False)


@pytest.mark.parametrize(("silent_s", "is_kept"), [(2, True), (60, False)])
def test_what_was_silent_for_long_is_forgotten(store: Store, digest: str, silent_s: int, is_kept: bool) -> None:
    name, folder = "pod-before.1.1", store.layout.folder("leases") / digest
    beat, temporary = store.layout.folder("processes") / name, store.layout.new_temporary(name, 5)
    folder.mkdir(exist_ok=True)
    for path in (beat, folder / name, temporary):
        path.touch()
    os.utime(beat, (time.time() - silent_s,) * 2)
    Store(store.layout.root)
    assert [path.exists() for path in (beat, folder / name, temporary)] == [is_kept] * 3
