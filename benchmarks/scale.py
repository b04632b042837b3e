"""Goal of R62, and the figures of docs/benchmarks/scale.md: `make bench-scale`.

What a server does with 100,000 names and 50,000 stored adapters: what its event loop notices, and how long it takes.

No engine: the real store, registry, reconciler and routes, around the planner of the tests and a made-up worker. The
goals of the loop are of CPU time (`benchmarks.event_loop`). What was made before is frozen, as vLLM's API server does
at start. Prints a Markdown table and keeps the figures in benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Hashable
from dataclasses import asdict, astuple, dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from benchmarks.event_loop import Lateness, Run, timed
from benchmarks.record import keep
from lora_plugins.api.access.administrators import Administrators
from lora_plugins.api.access.principals import KnowPrincipal
from lora_plugins.api.routes import router
from lora_plugins.events import Events
from lora_plugins.lifecycle import served_writer
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.registry import DesiredAdapter, ServedAdapter
from lora_plugins.lifecycle.served_file import ServedFile
from lora_plugins.settings import Settings
from lora_plugins.store.layout import Layout
from lora_plugins.store.manifest import Manifest, StoredFile, digest_of
from lora_plugins.store.store import Store
from tests.lifecycle.world import FakeResolver, Request, Version, World
from tests.store.common import DownloadSpec, adapter_files, check

NAMES, STORED, DECLARED = 100_000, 50_000, 7_000
REPEATS = 3
FETCHES = 7
LATE_MS, OPENED_S, FETCH_MS = 20.0, 1.0, 50.0
KEY = "the-key"


@dataclass
class Piece:
    """One thing that was measured: medians of `REPEATS` runs.

    Attributes:
        late_ms: how late the loop's latest turn was; None where nothing runs beside it.
        late_cpu_ms: the most CPU time that the process used between two turns.
        goal: in words. is_met: whether it was.
    """

    what: str
    took_s: float
    cpu_s: float
    late_ms: float | None
    late_cpu_ms: float | None
    goal: str
    is_met: bool


def of_loop(what: str, runs: list[Run]) -> Piece:
    took_s, cpu_s, late_s, late_cpu_s = (statistics.median(values) for values in zip(*runs, strict=True))
    goal = f"loop late ≤ {LATE_MS:.0f} ms"
    return Piece(what, took_s, cpu_s, 1e3 * late_s, 1e3 * late_cpu_s, goal, 1e3 * late_cpu_s <= LATE_MS)


class Resolver(FakeResolver):
    """The tests' one, over a real store."""

    events = Events()

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store  # type: ignore[assignment]
        self.known = SimpleNamespace(last=self.served_under.get)


class Stored(Version):
    """A version that lies in a real store."""

    root: Path

    @property
    def path(self) -> Path:
        return self.root / self.digest


def serve(world: World, root: Path, count: int) -> None:
    """Have `count` names be served, each from a digest of its own."""
    kind = type("OfStore", (Stored,), {"root": root})
    for number in range(count):
        name = f"team-{number % 97}/adapter-{number}"
        version = kind(sha256(name.encode()).hexdigest(), uri=f"s3://adapters/{name}")
        request = Request(name, number + 1, str(version.path))
        world.lifecycle.registry.put(ServedAdapter(name, request, version, uri=version.uri))


async def answer(app: FastAPI, path: str) -> list[bytes]:
    """What the application answers, in parts, to who has the key; nobody joins or parses them on this loop."""
    path, _, query = path.partition("?")
    parts: list[bytes] = []
    status, is_asked = 0, False

    async def receive() -> dict[str, Any]:
        nonlocal is_asked
        if is_asked:
            await asyncio.sleep(3600)
        is_asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"authorization", f"Bearer {KEY}".encode())],
        "client": ("127.0.0.1", 1),
        "server": ("x", 80),
    }
    await app(scope, receive, send)
    if status != 200:
        raise AssertionError(f"{status}: {b''.join(parts)[:300]!r}")
    return parts


def application(world: World) -> FastAPI:
    app = FastAPI()
    app.include_router(router)
    app.state.lora_plugins_lifecycle = world.lifecycle
    app.add_middleware(KnowPrincipal, administrators=Administrators(key=KEY))
    return app


async def at_rest() -> Piece:
    """What the machine alone makes of a loop that has nothing to do."""
    return of_loop("nothing: one second of rest", [await timed(lambda: asyncio.sleep(1)) for _ in range(REPEATS)])


async def listing(folder: Path, count: int) -> list[Piece]:
    store = Store(folder / f"listed-{count}")
    world = World(resolver=Resolver(store))
    serve(world, store.layout.root, count)
    app = application(world)
    await answer(app, "/v1/loras?limit=1")
    gc.collect()
    gc.freeze()
    pages = [await timed(lambda: answer(app, "/v1/loras")) for _ in range(REPEATS)]
    return [of_loop(f"`GET /v1/loras`, a page of 1,000 of {count:,} names", pages)]


async def written(folder: Path) -> Piece:
    """The served list, from a change of what is served until all names are on the disk."""
    store = Store(folder / "served")
    world, file = World(resolver=Resolver(store)), ServedFile.of_store(folder / "served", "base", "replica")
    serve(world, store.layout.root, NAMES)
    served_writer._WRITE_PAUSE = 0  # the rest between two writes is as long as ten of them
    reconciler = Reconciler(world.lifecycle, Settings(), file, Events())
    gc.collect()
    gc.freeze()
    runs = []
    for _ in range(REPEATS):
        world.lifecycle.registry.remove(next(iter(world.table.lora_requests)))
        file.path.unlink(missing_ok=True)
        runs.append(await timed(reconciler._writer.written))
    return of_loop(f"the served list of {NAMES:,} names, written", runs)


def declaring(path: Path, preload: bool, count: int = DECLARED) -> None:
    """A file as large as a ConfigMap may be."""
    lines = [f"  - name: team-{n % 97}/adapter-{n}\n    uri: s3://adapters/team-{n % 97}/adapter-{n}/v{n}\n"
             "    pin: false\n    preload: false\n" for n in range(count)]  # fmt: skip
    path.write_text("adapters:\n" + "".join(lines).replace("preload: false", f"preload: {str(preload).lower()}"))


async def followed(folder: Path) -> Piece:
    """The file of declared adapters, changed: from its change until all are being served, in whatever order."""
    path = folder / "adapters.yaml"
    declaring(path, preload=False)
    world = World()
    settings = Settings(adapters_file=path, allowed_uris=("s3://adapters/",))
    one = Reconciler(world.lifecycle, settings, ServedFile(folder / "declared.json"), Events())
    runs = []
    for number in range(REPEATS):
        if not number:
            await one.start()
        declaring(path, preload=False, count=DECLARED - number - 1)

        async def follow() -> None:
            await one._read_again(path)

        gc.collect()
        gc.freeze()
        runs.append(await timed(follow))
    return of_loop(f"a declared file of {DECLARED:,} entries, changed", runs)


async def restored(folder: Path) -> Piece:
    """What the last server served, begun to be served again: the first three seconds."""
    file = ServedFile(folder / "restored.json")
    file.write(map(astuple, [DesiredAdapter(f"adapter-{n}", f"s3://adapters/{n}") for n in range(NAMES)]))
    runs = []
    for _ in range(REPEATS):
        world = World()
        world.resolver.hung |= {f"s3://adapters/{n}" for n in range(NAMES)}
        one = Reconciler(world.lifecycle, Settings(restore=True), file, Events())
        gc.collect()
        gc.freeze()

        async with Lateness() as lateness:
            started, cpu = time.perf_counter(), time.process_time()
            starting = asyncio.create_task(one.start())
            await asyncio.wait([starting], timeout=3)
            took_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        runs.append((took_s, cpu_s, *lateness.longest))
        starting.cancel()
        await asyncio.wait([starting])
    return of_loop(f"{NAMES:,} names to be restored, their source hangs: 3 s", runs)


# --- the store ---


def fill(root: Path, count: int) -> int:
    """Publish `count` adapters as the store does, with the smallest files; returns their bytes together."""
    layout = Layout(root)
    layout.create()
    now = time.time()
    for number in range(count):
        files = tuple(
            StoredFile(name, 1000, sha256(f"{number}{name}".encode()).hexdigest())
            for name in ("adapter_config.json", "adapter_model.safetensors")
        )
        digest, uri = digest_of(files), f"s3://adapters/{number}"
        directory = layout.adapter(digest)
        directory.mkdir()
        manifest = Manifest(digest, uri, "1", files, "2026-01-01T00:00:00Z", replace(files[0], size_bytes=900))
        (directory / "manifest.json").write_bytes(manifest.to_json())
        layout.index(uri, "1", "").write_text(digest)
        use = layout.folder("uses") / digest
        use.touch()
        os.utime(use, (now - count + number,) * 2)
        (layout.folder("leases") / digest).mkdir()
    return 2000 * count


def opened(root: Path) -> tuple[float, float, Store]:
    started, cpu = time.perf_counter(), time.process_time()
    store = Store(root)
    return time.perf_counter() - started, time.process_time() - cpu, store


def fetched(store: Store, first: int) -> list[Run]:
    """Of each fetch."""

    async def run() -> list[Run]:
        runs = []
        for number in range(first, first + FETCHES):
            wanted = DownloadSpec(adapter_files(seed=number), uri=f"test://{number}")

            async def fetch(wanted: DownloadSpec = wanted, holder: Hashable = number) -> None:
                await store.obtain(wanted, wanted.fetch, check, holder)

            runs.append(await timed(fetch))
        return runs

    return asyncio.run(run())


def of_store(folder: Path, stored: int) -> list[Piece]:
    root = folder / "store"
    size_bytes = fill(root, stored)
    first_s, first_cpu_s, store = opened(root)
    wait_for_threads()
    later = [opened(root)[:2] for _ in range(REPEATS)]
    wait_for_threads()
    took_s, cpu_s = (statistics.median(values) for values in zip(*later, strict=True))
    goal = f"≤ {OPENED_S:.0f} s"
    pieces = [
        Piece(
            f"a store of {stored:,} opened, the first time", first_s, first_cpu_s, None, None, goal, first_s <= OPENED_S
        ),
        Piece(f"a store of {stored:,} opened, later", took_s, cpu_s, None, None, goal, took_s <= OPENED_S),
    ]
    del store
    empty = Store(folder / "empty", max_bytes=size_bytes)
    alone_s, alone_cpu_s, *_ = (statistics.median(values) for values in zip(*fetched(empty, 0), strict=True))
    pieces.append(Piece("a fetch into an empty store", alone_s, alone_cpu_s, None, None, "", True))
    for what, max_bytes in (("with room", 10 * size_bytes), ("full: one goes for each", size_bytes)):
        one = Store(root, max_bytes=max_bytes)
        wait_for_threads()
        runs = fetched(one, 100 if max_bytes > size_bytes else 200)
        for when, some in (("the first fetch", runs[:1]), ("a fetch", runs[1:])):
            took_s, cpu_s, late_s, late_cpu_s = (statistics.median(values) for values in zip(*some, strict=True))
            more_ms, cpu_ms = 1e3 * (took_s - alone_s), 1e3 * (cpu_s - alone_cpu_s)
            goal = f"≤ {FETCH_MS:.0f} ms over an empty one; it is {more_ms:.0f} ms, of CPU {cpu_ms:.0f} ms"
            name = f"{when} into a store of {stored:,} {what}"
            pieces.append(Piece(name, took_s, cpu_s, 1e3 * late_s, 1e3 * late_cpu_s, goal, more_ms <= FETCH_MS))
    return pieces


def wait_for_threads() -> None:
    """What opening a store has left to its threads is over."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if not any(thread.name.startswith("lora-plugins-open") for thread in threading.enumerate()):
            return
        time.sleep(0.01)


def show(piece: Piece) -> None:
    late, late_cpu = ("" if ms is None else f"{ms:.0f} ms" for ms in (piece.late_ms, piece.late_cpu_ms))
    met = ("yes" if piece.is_met else "**no**") if piece.goal else ""
    times = f"{piece.took_s:.3f} s | {piece.cpu_s:.3f} s | {late} | {late_cpu}"
    print(f"| {piece.what} | {times} | {piece.goal} | {met} |", flush=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", default="", help="pieces whose names have this, as listing, store, declared")
    arguments.add_argument("--stored", type=int, default=STORED)
    arguments.add_argument("--dry", action="store_true", help="keep no figures")
    chosen = arguments.parse_args()
    served_writer._WRITE_DELAY_S = 0.05
    pieces: list[Piece] = []
    folder = Path(tempfile.mkdtemp(prefix="scale-"))
    print("| what | takes | CPU | loop late | of which CPU | goal | met |")
    print("|---|---|---|---|---|---|---|", flush=True)
    try:
        for what, measure in (
            ("", lambda: [asyncio.run(at_rest())]),
            ("listing", lambda: asyncio.run(listing(folder, 10_000)) + asyncio.run(listing(folder, NAMES))),
            ("served", lambda: [asyncio.run(written(folder))]),
            ("declared", lambda: [asyncio.run(followed(folder))]),
            ("restored", lambda: [asyncio.run(restored(folder))]),
            ("store", lambda: of_store(folder, chosen.stored)),
        ):
            if not what or chosen.only in what:
                for piece in measure():
                    show(piece)
                    pieces.append(piece)
                gc.unfreeze()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not chosen.dry:
        print(f"\nMedians of {REPEATS} runs; raw: {keep('scale', [asdict(piece) for piece in pieces]).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
