"""The end of a process, or of the power, at each change that an operation makes to files: nothing is half or forgotten.

An operation runs in a forked process, which ends before its k-th change (`os._exit`, or an exception that nothing
catches), for every k. Another process then opens the store: what it finds is what was there before the operation, or
after; the operation succeeds again, also where that try ends as well; and no file is left that an operation without a
crash would not have left. For power cuts, `Disk` notes what each `fsync` makes durable.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import shutil
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.lifecycle.served_file import ServedFile
from lora_plugins.resolvers.sources.pushed import PushedAdapter, PushSource
from lora_plugins.store import processes
from lora_plugins.store import store as store_module
from lora_plugins.store.durable_files import discard
from lora_plugins.store.store import Store
from tests.other_processes import other_processes
from tests.repetitions import IS_LONG, times
from tests.store.common import DownloadSpec, adapter_files, check, obtain, spoil

NEVER, AT_END = 10**9, 9999
FOLDERS_OF_PROCESSES = (".processes", ".locks")
ONE, TWO = (DownloadSpec(adapter_files(seed=seed), version=f"v{seed}") for seed in (1, 2))
OLD, NEW = (DesiredAdapter(name, is_pinned=True) for name in ("old", "new"))
SIZE_BYTES = sum(map(len, ONE.files.values()))


# --- operations: what is there before, and what is done


def nothing(_: object) -> None: ...


def one(root: Path) -> None:
    obtain(Store(root), ONE)


def damaged(root: Path, *, is_marked: bool) -> None:
    store = Store(root)
    stored = obtain(store, ONE)
    spoil(stored.directory)
    if is_marked:
        (store.layout.folder("damaged") / stored.digest).touch()


def older(root: Path) -> None:
    """What earlier releases and killed processes have left."""
    store = Store(root)
    stored = obtain(store, ONE)
    dead = "0-0.1.1"
    (store.layout.new_temporary(dead, 10)).mkdir()
    (store.layout.new_temporary(dead)).write_text("x")
    (store.layout.folder("locks") / "x.fetch").write_text(dead)
    (store.layout.folder("leases") / stored.digest / dead).touch()
    for folder in (root / ".quarantine" / f"{stored.digest}.x.removed", root / ".parts" / "x"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    for name in ("blocked", "damaged", "served"):
        store.layout.folder(name).rmdir()


def served(root: Path) -> None:
    serve(Store(root), OLD)


def without_folders(root: Path) -> None:
    store = Store(root)
    obtain(store, ONE)
    for name in ("leases", "uses", "tmp"):
        shutil.rmtree(store.layout.folder(name))


def fetch_without_sync(left_out: str, store: Store) -> None:
    def without(real: Callable[[list[Path]], object], paths: list[Path]) -> object:
        return real([path for path in paths if left_out != ("a directory" if path.is_dir() else path.name)])

    for name in ("make_durable", "start_syncing"):
        setattr(store_module, name, partial(without, getattr(store_module, name)))
    obtain(store, ONE)


def digest_of_one(store: Store) -> str:
    return next(iter(store.layout.digests()), "0" * 64)


def block(store: Store) -> None:
    store.blocks.hold("sql")
    store.blocks.write("sql")


def unblock(store: Store) -> None:
    assert store.blocks.lift("sql", store.blocks.present("sql"))


def list_of(root: Path) -> ServedFile:
    return ServedFile.of_store(root, "base", "me")


def serve(store: Store, *lists: DesiredAdapter) -> None:
    """Write the lists of one name one after the other: the first whole, a change and a removal appended."""
    file = list_of(store.layout.root)
    for adapter in lists:
        file.write(map(astuple, [adapter]))


def push(store: Store) -> None:
    """As `lifecycle/pushing.py` does: a directory of the store, the store's own, then the list, then the answer."""
    directory = store.layout.new_temporary(store.processes.me())
    directory.mkdir()
    for name, content in ONE.files.items():
        (directory / name).write_bytes(content)
    pushed = PushedAdapter.of("sql", directory, "ab" * 32)
    stored = asyncio.run(store.obtain(pushed, partial(PushSource().fetch, pushed), check))
    serve(store, DesiredAdapter("sql", held_digest=stored.digest))
    discard(directory)


def lease(store: Store) -> None:
    digest = digest_of_one(store)
    assert store.acquire(digest, "name")
    store.release("name", store.layout.adapter(digest))


@dataclass(frozen=True)
class Operation:
    """Attributes:
    opens: the opening of the store counts too.
    lasting: what must survive a power cut once the operation has ended.
    max_bytes: the budget.
    """

    prepare: Callable[[Path], None]
    act: Callable[[Store], object]
    opens: bool = False
    lasting: tuple[str, ...] = ()
    max_bytes: int | None = None


OPERATIONS = {
    "open": Operation(nothing, nothing, opens=True),
    "open an older store": Operation(older, lease, opens=True),
    "fetch": Operation(nothing, lambda store: obtain(store, ONE)),
    "fetch and evict": Operation(one, lambda store: obtain(store, TWO), max_bytes=SIZE_BYTES),
    "fetch what is damaged": Operation(partial(damaged, is_marked=True), lambda store: obtain(store, ONE)),
    "find damage": Operation(partial(damaged, is_marked=False), lambda store: store.verify(digest_of_one(store))),
    "remove": Operation(one, lambda store: store.remove(digest_of_one(store))),
    "push": Operation(served, push, lasting=("sound", "served")),
    "block": Operation(nothing, block, opens=True, lasting=("blocked",)),
    "unblock": Operation(lambda root: block(Store(root)), unblock, lasting=("blocked",)),
    "write the list": Operation(served, lambda store: serve(store, NEW), lasting=("served",)),
    "change the list": Operation(served, lambda store: serve(store, OLD, DesiredAdapter("new")), lasting=("served",)),
    "lease": Operation(one, lease),
    "make folders again": Operation(without_folders, lease),
    "give way": Operation(one, lambda store: store._make_room(1, 0)),
}
FAULTY = {
    left_out: Operation(nothing, partial(fetch_without_sync, left_out))
    for left_out in ("adapter_config.json", "adapter_model.safetensors", "manifest.json", "a directory")
}


# --- what a process sees


def seen(root: Path) -> dict[str, list[str]]:
    """What a fresh process finds."""
    store = Store(root)
    digests = [digest for digest in store.layout.digests() if not store.is_marked(digest)]
    versions = [(it.uri, it.version) for it in (ONE, TWO)] + [("push://sql", "ab" * 32)]
    stored = (store.find_leased(uri, version, ONE.files, "test") for uri, version in versions)
    found = {f"{version} is {it.digest}" for (_, version), it in zip(versions, stored, strict=True) if it is not None}
    sound = [digest for digest in digests if store.acquire_sound(digest, "test") is not None]
    return {
        "sound": sound,
        "half": [digest for digest in digests if digest not in sound],
        "found": sorted(found),
        "blocked": sorted(store.blocks.names()),
        "served": [f"{it.name} {it.held_digest} {it.is_pinned}" for it in list_of(root).read()],
    }


def left(root: Path) -> dict[str, list[str]]:
    """What a fresh process finds, and all paths of the store without what is random in them, once owners are gone."""
    age(root)
    found = seen(root)
    pids = {f".{os.getpid()}."}

    paths = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.relative_to(root).parts[0] not in FOLDERS_OF_PROCESSES
        and not any(pid in path.name for pid in pids)
        and path.suffix != ".copied"  # two replicas may begin with one list
    }
    locks = [path.name for path in (root / ".locks").iterdir() if path.suffix != ".guard"]
    modes = [oct(stat.S_IMODE(root.stat().st_mode))]
    return {**found, "paths": sorted(paths), "locks": locks, "modes": modes}


# --- crashes


class Crash(BaseException):
    """What nothing catches."""


class Changes:
    """Calls `before` with the number of each change of files below `root`, before it is made."""

    def __init__(self, root: Path, before: Callable[[int], None], synced: Callable[[int], None] | None = None) -> None:
        self._root, self._before = str(root), before
        self.count, self._counting, self.names = 0, threading.RLock(), []
        self._is_on = True
        real_fsync, real_open = os.fsync, io.open

        def fsync(descriptor: int) -> None:
            sys.audit("crash.fsync", f"/proc/self/fd/{descriptor}")
            real_fsync(descriptor)
            if synced is not None:
                synced(descriptor)

        def open_(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            opened = real_open(file, mode, *arguments, **named)
            if set(mode) & set("wxa+"):
                sys.audit("crash.write", os.fspath(file))
            return opened

        os.fsync, io.open = fsync, open_
        sys.addaudithook(self._audit)

    def stop(self) -> None:
        self._is_on = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or not self._is_change(event, arguments):
            return
        with self._counting:
            self.count += 1
            self.names.append(event)
            self._before(self.count)

    def _is_change(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = arguments
            return bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)) and str(path).startswith(self._root)
        if event == "crash.fsync":
            return os.readlink(arguments[0]).startswith(self._root)
        changes = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.utime", "os.chmod", "crash.write")
        # `shutil.rmtree` names entries of a directory that is open.
        return event in changes and (str(arguments[0]).startswith(self._root) or arguments[-1] not in (-1, None))


def forked(function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    """Exit status and result of a call in a process of its own; 9 where it has crashed, 1 where it has failed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            result = function(*arguments)
            os.write(writer, json.dumps(result).encode())
            status = 0
        except Crash:
            status = 9
        except BaseException:
            os.write(writer, json.dumps(traceback.format_exc()).encode())
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, json.loads(text) if text else None


def begin(operation: Operation, root: Path, before: Callable[[int], None], disk: Disk | None = None) -> Changes:
    """Do the operation; returns the changes that it has made."""
    store = None if operation.opens else Store(root, max_bytes=operation.max_bytes)
    if store is not None and disk is None:
        age(root)  # the store was opened before the others were gone
    if store is not None and disk is not None:
        disk.note_all()
    changes = Changes(root, before, disk.note_descriptor if disk is not None else None)
    operation.act(store or Store(root, max_bytes=operation.max_bytes))
    return changes


def act(operation: Operation, root: Path, crash_at: int, how: str) -> list[str]:
    """Do the operation, with a crash before a change; returns the kinds of changes."""

    def before(number: int) -> None:
        if number == crash_at:
            if how == "exit":
                os._exit(9)
            raise Crash

    return begin(operation, root, before).names


def age(root: Path) -> None:
    """Other hosts have been silent for long."""
    for entry in (root / ".processes").iterdir():
        if f".{os.getpid()}." not in entry.name:
            os.utime(entry, (0, 0))


def copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    if source.exists():
        shutil.copytree(source, target)
    return target


def between(found: dict[str, Any], before: dict[str, Any], after: dict[str, Any], *, may_lack: bool) -> list[str]:
    """What is neither as before nor as after an operation; with `may_lack`, what was cached may be gone."""
    wrong = []
    for key in ("sound", "half", "found", "blocked"):
        old, new, now = set(before[key]), set(after[key]), set(found[key])
        if not now <= old | new or not (old & new <= now or key == "half" or (may_lack and key != "blocked")):
            wrong.append(f"{key}: {sorted(now)}, before {sorted(old)}, after {sorted(new)}")
    if found["served"] not in (before["served"], after["served"]):
        wrong.append(f"served: {found['served']}, before {before['served']}, after {after['served']}")
    return wrong


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        f"{key}: has {sorted(set(found[key]) - set(wanted[key]))}, lacks {sorted(set(wanted[key]) - set(found[key]))}"
        for key in wanted
        if found[key] != wanted[key]
    ]


@dataclass
class Trials:
    """The trials of one operation, in a process that has no threads."""

    operation: Operation
    folder: Path

    def __post_init__(self) -> None:
        os.umask(0o022)
        self.prepared, self.root = self.folder / "prepared", self.folder / "store"
        self.wrong: list[str] = []
        self.count = 0
        self._do(self.operation.prepare, self.prepared)
        self.before = {key: [] for key in ("sound", "half", "found", "blocked", "served")}
        if self.operation.prepare is not nothing:
            # A look makes a new replica's list, and finds damage.
            self.before = self._do(seen, copied(self.prepared, self.root))
        self.names = self._do(act, self.operation, copied(self.prepared, self.root), NEVER, "exit")
        self.after = self._do(left, self.root)

    def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        status, result = forked(function, *arguments)
        if status:
            raise RuntimeError(f"{function} failed: {result}")
        return result

    def _see(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        status, result = forked(function, *arguments)
        if status:
            self.wrong.append(f"{what}: {result}")
            return None
        return result

    def crash(self, at: int, how: str, again_at: int | None) -> None:
        """One crash, a second one in the next try, and then the last."""
        self.count += 1
        what = f"{how} at {at} ({self.names[at - 1] if at <= len(self.names) else 'end'})"
        root = copied(self.prepared, self.root)
        status, result = forked(act, self.operation, root, at, how)
        if status not in (9, 0) or (status == 0 and at <= len(self.names) and how == "exit"):
            self.wrong.append(f"{what}: {status} {result}")
        self._check(what, self.after if status == 0 else None)
        if again_at is not None:
            status, result = forked(act, self.operation, copied(self.prepared, self.root), at, how)
            status, result = forked(act, self.operation, root, again_at, how)
            what += f" and {again_at}"
            if status not in (9, 0):
                self.wrong.append(f"{what}: {status} {result}")
            self._check(what, self.after if status == 0 else None)

    def _check(self, what: str, wanted: dict[str, Any] | None) -> None:
        if (found := self._see(what, seen, self.root)) is not None:
            self.wrong += [f"{what}: {it}" for it in between(found, self.before, self.after, may_lack=False)]
            if wanted is not None:
                self.wrong += [f"{what}, answered: {key}" for key in found if found[key] != wanted[key]]
        self._retry(what)

    def _retry(self, what: str, act: Callable[..., Any] = act) -> None:
        again = self._see(f"{what}, again", act, self.operation, self.root, NEVER, "exit")
        if again is not None and (found := self._see(what, left, self.root)) is not None:
            self.wrong += [f"{what}, at last: {it}" for it in differences(found, self.after)]

    def cut_power(self, numbers: set[int]) -> None:
        """The trees that a cut may leave before each change, and after the end."""
        root = copied(self.prepared, self.root)
        cuts = self.folder / "cuts"
        shutil.rmtree(cuts, ignore_errors=True)
        self._do(act_with_cuts, self.operation, root, cuts)
        for tree in sorted(cuts.iterdir()):
            number, _, how = tree.name.partition("-")
            if int(number) not in numbers:
                continue
            self.count += 1
            what = f"cut, {how}, at {number}"
            shutil.rmtree(self.root)
            tree.rename(self.root)
            found = self._see(what, partial(seen_after_reboot, seen), self.root)
            if found is not None:
                self.wrong += [f"{what}: {it}" for it in between(found, self.before, self.after, may_lack=True)]
                if int(number) == AT_END:
                    self.wrong += [
                        f"{what}, answered: {key} {found[key]}"
                        for key in self.operation.lasting
                        if found[key] != self.after[key]
                    ]
            self._retry(what, partial(seen_after_reboot, act))


# --- power cuts


class Disk:
    """What would be there after a power cut, below one root. Files that it knows stay open: no other gets their inode.

    Attributes:
        lost: the tree where everything that nobody has synced is lost.
        kept: the tree where the store's own folders have all names, as if a rename never got lost, and where adapters'
            directories and files have what they had at their last fsync.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[int, Any] = {}
        self._lock = threading.RLock()
        self.note(root.parent)
        if root.exists():
            self.note_all()

    def note_all(self) -> None:
        for path in (self._root, *self._root.rglob("*")):
            self.note(path)

    def note_descriptor(self, descriptor: int) -> None:
        self.note(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def note(self, path: Path) -> None:
        """Take over what a file or directory has now."""
        with self._lock:
            descriptor = os.open(path, os.O_RDONLY)
            about = os.fstat(descriptor)
            if stat.S_ISDIR(about.st_mode):
                entries = [
                    it
                    for it in os.scandir(descriptor)
                    if path == self._root or self._root in path.parents or it.name == self._root.name
                ]
                content: Any = {it.name: (it.inode(), it.is_dir()) for it in entries}
            else:
                content = os.pread(descriptor, 1 << 24, 0)
            self._known[about.st_ino] = (content, about.st_mtime, descriptor)

    def lost(self) -> dict[str, Any]:
        return self._tree_of(self._root.parent.stat().st_ino, "")

    def _tree_of(self, inode: int, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        content = self._known[inode][0]
        for name, (of_name, is_directory) in content.items():
            known = self._known.get(of_name)
            if is_directory:
                found[f"{path}{name}"] = None
                found |= self._tree_of(of_name, f"{path}{name}/") if known else {}
            else:
                found[f"{path}{name}"] = known[:2] if known else (b"", time.time())
        return found

    def kept(self) -> dict[str, Any]:
        while True:
            try:
                found: dict[str, Any] = {}
                for path in (self._root, *sorted(self._root.rglob("*"))) if self._root.exists() else ():
                    known = self._known.get(path.stat().st_ino, (b"", time.time()))
                    of_folder = self._known.get(path.parent.stat().st_ino, ({},))[0]
                    is_stores = path.parent in (self._root.parent, self._root) or path.parent.name.startswith(".")
                    if is_stores or path.name in of_folder:
                        found[str(path.relative_to(self._root.parent))] = None if path.is_dir() else known[:2]
                return found
            except FileNotFoundError:
                continue  # another thread has just moved it


def act_with_cuts(operation: Operation, root: Path, cuts: Path) -> None:
    disk = Disk(root)
    trees: dict[str, dict[str, Any]] = {}

    def before(number: int) -> None:
        trees[f"{number:04}-lost"], trees[f"{number:04}-kept"] = disk.lost(), disk.kept()

    changes = begin(operation, root, before, disk)
    before(AT_END)
    changes.stop()
    for name, tree in trees.items():
        target = cuts / name
        target.mkdir(mode=0o700, parents=True)
        for path, content in tree.items():
            to = target.joinpath(*Path(path).parts[1:])
            if content is None:
                to.mkdir(mode=0o700, exist_ok=True)
            else:
                to.write_bytes(content[0])
                os.utime(to, (content[1],) * 2)


def seen_after_reboot(function: Callable[..., Any], *arguments: Any) -> Any:
    """The machine starts again after two minutes: others cannot be asked, and have not been silent for long."""
    root = next(it for it in arguments if isinstance(it, Path))
    processes._host = lambda: "rebooted"
    folder = root / ".processes"
    for entry in folder.iterdir() if folder.exists() else ():
        if not entry.name.startswith("rebooted"):
            os.utime(entry, (time.time() - 120,) * 2)
    return function(*arguments)


# --- tests


def try_points(name: str, folder: Path) -> tuple[int, list[str]]:
    """Try every point in a long run, otherwise a few, which differ by operation: how many, and what was wrong."""
    trials, chance = Trials((OPERATIONS | FAULTY)[name], folder), random.Random(name)
    ends = range(1, len(trials.names) + 2)

    def some() -> list[int]:
        return chance.sample(ends, times(len(ends), short=1))

    if name in OPERATIONS:
        for at in some():
            trials.crash(at, "exit", again_at=chance.choice(ends))
        for at in some():
            trials.crash(at, "raise", again_at=chance.choice(ends) if IS_LONG else None)
    trials.cut_power({*some(), AT_END})
    return trials.count, trials.wrong


def tried(name: str, folder: Path) -> list[str]:
    """What was wrong."""
    # This process may have threads, which a fork would lose.
    with other_processes() as process:
        count, wrong = process.submit(try_points, name, folder).result()
    print(f"{count} trials", *wrong, sep="\n")
    assert count > 1, wrong
    return wrong


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_crash_or_power_cut_leaves_nothing_half(name: str, tmp_path: Path) -> None:
    assert not tried(name, tmp_path)


@pytest.mark.parametrize("left_out", FAULTY)
def test_a_sync_that_is_left_out_is_noticed(left_out: str, tmp_path: Path) -> None:
    # Of the tests above, not of the store: they would be worth nothing if they passed here.
    assert any("half" in it for it in tried(left_out, tmp_path))
