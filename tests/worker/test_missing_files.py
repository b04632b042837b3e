"""Two workers whose stores are different directories: what one lacks is fetched from its source, by digest."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, SourceUnavailable
from lora_plugins.events import Events
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.scheduler.messages import AdapterSpec, Failed, Load, Loaded
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.store import Store
from lora_plugins.vllm_patches.engine_modules import model_of
from lora_plugins.worker.missing_files import MissingFilesFetcher
from lora_plugins.worker.model_description import describe
from tests.worker.small_model import Adapter, Make, bring, ended, evict, load, make_adapter, runs, serve

BASE = "org/small"


class Node:
    """A machine with a store of its own, which sees the same adapters."""

    def __init__(self, store: Path, adapters: Path, base: BaseModel | None = None) -> None:
        settings = Settings(store_dir=store, base_match=BaseMatch.OFF, allowed_uris=(adapters.as_uri(),))
        self.store = Store(store)
        self.resolver = AdapterResolver(settings, Events(), self.store, [FilesystemSource(adapters)])
        self.resolver.base = base
        self.materialiser = MissingFilesFetcher(BASE, lambda: self.resolver)

    def serve(self, name: str) -> Path:
        resolved = asyncio.run(self.resolver.resolve(name, BASE))
        assert resolved is not None
        return resolved.path

    def is_leased(self, digest: str) -> bool:
        return bool(self.store.leases.holders(digest))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_adapter(tmp_path / "adapters" / "adapter-1", 1)
    return tmp_path / "adapters"


@pytest.fixture
def here(tmp_path: Path, root: Path) -> Node:
    """The API server's machine."""
    return Node(tmp_path / "store-here", root)


@pytest.fixture
def there(tmp_path: Path, root: Path) -> Node:
    """A worker's machine."""
    return Node(tmp_path / "store-there", root)


def test_what_this_machine_lacks_is_fetched_from_its_source(here: Node, there: Node) -> None:
    path = here.serve("adapter-1")
    fetched = Path(there.materialiser.fetch("adapter-1", str(path)))
    assert fetched == there.store.layout.adapter(path.name)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (fetched / file).read_bytes() == (path / file).read_bytes()


def load_uri(node: Node, name: str, uri: str) -> Path:
    return asyncio.run(node.resolver.resolve(name, BASE, uri)).path


def test_what_was_loaded_by_uri_is_fetched_from_there(here: Node, there: Node, root: Path) -> None:
    uri = (root / "adapter-1").as_uri()
    path = load_uri(here, "sql", uri)
    with pytest.raises(AdapterNotFound):
        there.materialiser.fetch("sql", str(path))
    fetched = there.materialiser.fetch("sql", str(path), uri)
    assert Path(fetched) == there.store.layout.adapter(path.name)
    there.materialiser.release("sql", fetched)
    assert not there.is_leased(path.name)


def test_a_uri_that_this_process_does_not_allow_is_refused(here: Node, tmp_path: Path, root: Path) -> None:
    path = load_uri(here, "sql", (root / "adapter-1").as_uri())
    make_adapter(tmp_path / "elsewhere" / "adapter-1", 1)
    there = Node(tmp_path / "store-there", tmp_path / "elsewhere")
    with pytest.raises(InvalidAdapter, match="not allowed"):
        there.materialiser.fetch("sql", str(path), (root / "adapter-1").as_uri())


@pytest.mark.parametrize("by_uri", [False, True])
def test_new_version_is_fetched_right_after_the_old_one(here: Node, there: Node, root: Path, by_uri: bool) -> None:
    uri = (root / "adapter-1").as_uri() if by_uri else None
    for seed in (1, 2):
        make_adapter(root / "adapter-1", 1, seed=seed)
        newest = asyncio.run(here.resolver.latest("adapter-1", uri, BASE))
        assert newest is not None
        fetched = there.materialiser.fetch("adapter-1", str(newest.path), uri)
        assert Path(fetched).name == newest.digest


def test_it_is_leased_until_it_has_been_read(here: Node, there: Node, root: Path) -> None:
    path = here.serve("adapter-1")
    for _ in range(2):  # fetched the first time, found in the store the second
        fetched = there.materialiser.fetch("adapter-1", str(path))
        assert there.is_leased(path.name)
        assert not there.store.remove(path.name)
        there.materialiser.release("adapter-1", fetched)
        assert not there.is_leased(path.name)
    there.materialiser.release("adapter-1", fetched)
    shutil.rmtree(root / "adapter-1")
    assert there.materialiser.fetch("adapter-1", str(path)) == fetched, "stored, and missing at its source"


def test_equal_bytes_are_leased_until_both_names_are_read(here: Node, there: Node, root: Path) -> None:
    shutil.copytree(root / "adapter-1", root / "copy")
    path = here.serve("adapter-1")
    assert here.serve("copy") == path
    first, second = (there.materialiser.fetch(name, str(path)) for name in ("adapter-1", "copy"))
    there.materialiser.release("adapter-1", first)
    assert there.is_leased(path.name)
    there.materialiser.release("copy", second)
    assert not there.is_leased(path.name)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda at: make_adapter(at, 1, seed=99), SourceUnavailable, "another version"),
        (shutil.rmtree, AdapterNotFound, "no such adapter at any source"),
        (lambda at: (at / "adapter_model.safetensors").write_bytes(b"short"), InvalidAdapter, "adapter_model"),
    ],
    ids=["other bytes", "missing", "broken"],
)
def test_what_has_changed_at_its_source_is_refused(
    here: Node, there: Node, root: Path, change: Callable[[Path], Any], kind: type[Exception], says: str
) -> None:
    path = here.serve("adapter-1")
    change(root / "adapter-1")
    with pytest.raises(kind, match=says):
        there.materialiser.fetch("adapter-1", str(path))
    assert not [digest for digest in there.store.layout.digests() if there.is_leased(digest)]


@pytest.mark.parametrize("path", ["/somewhere/by/hand", "/store/0123"])
def test_a_path_of_no_store_is_not_found(there: Node, path: str) -> None:
    with pytest.raises(AdapterNotFound, match="no such directory in this worker"):
        there.materialiser.fetch("adapter-1", path)
    with pytest.raises(AdapterNotFound, match="name a resolver"):
        MissingFilesFetcher(BASE, lambda: None).fetch("adapter-1", "/store/" + "a" * 64)


def test_what_one_machine_has_converted_another_converts_alike(make_manager: Make, tmp_path: Path, root: Path) -> None:
    """By the same modules; without them it has the original only, whose digest is another one."""
    from safetensors.torch import load_file, save_file

    weights = root / "adapter-1" / "adapter_model.safetensors"
    save_file({name.replace(".weight", ".default.weight"): t for name, t in load_file(weights).items()}, weights)
    manager = make_manager()
    base = BaseModel(BASE, model=model_of(manager._modules_of_model()))
    here, there, blind = (Node(tmp_path / name, root, known) for name, known in (("h", base), ("t", base), ("b", None)))
    path = elsewhere(here.serve("adapter-1"))
    assert Path(there.materialiser.fetch("adapter-1", str(path))).name == path.name
    with pytest.raises(SourceUnavailable, match="another version at the source"):
        blind.materialiser.fetch("adapter-1", str(path))


def test_a_workers_resolver_knows_the_whole_models_modules(make_manager: Make) -> None:
    given: list[Any] = []
    manager = make_manager()
    manager._make_resolver = lambda *arguments: given.append(arguments)
    with pytest.raises(AdapterNotFound):
        manager.jobs._files.fetch("adapter-1", "/nowhere/" + "a" * 64)
    assert [modules for _, modules in given] == [describe(manager._adapter_manager)]
    manager._is_whole_model = False
    assert manager._modules_of_model() is None
    manager.whole_model = given[0][1]
    assert manager._modules_of_model() is given[0][1]


def worker_on(make_manager: Make, node: Node) -> Any:
    manager = make_manager()
    manager.jobs._files = node.materialiser
    return manager


def elsewhere(path: Path) -> Path:
    """The path that an API server on another machine names."""
    shutil.move(path, path.with_name("another-machine"))
    return path


def test_a_worker_on_another_machine_serves_it(make_manager: Make, here: Node, there: Node, root: Path) -> None:
    manager, path = worker_on(make_manager, there), elsewhere(here.serve("adapter-1"))
    original = make_adapter(root.parent / "again", 1)
    adapter = Adapter(1, path, original.a, original.b)
    serve(manager, adapter, 0)
    assert not there.is_leased(path.name)
    shutil.rmtree(there.store.layout.adapter(path.name))
    assert runs(manager, adapter)


def test_worker_gets_the_uri_that_an_adapter_was_loaded_by(
    make_manager: Make, here: Node, there: Node, root: Path
) -> None:
    uri = (root / "adapter-1").as_uri()
    manager, path = worker_on(make_manager, there), elsewhere(load_uri(here, "sql", uri))
    manager.begin_step([Load(AdapterSpec(1, "sql", str(path), uri), 1, 1)])
    assert isinstance(ended(manager, 1), Loaded)


def test_adapter_evicted_while_it_is_fetched_is_not_read(
    make_manager: Make, here: Node, there: Node, tmp_path: Path
) -> None:
    manager, path = worker_on(make_manager, there), elsewhere(here.serve("adapter-1"))
    fetch = there.materialiser.fetch
    fetching, go = threading.Event(), threading.Event()

    def fetch_slowly(name: str, path: str, uri: str | None = None) -> str:
        fetching.set()
        assert go.wait(60)
        return fetch(name, path, uri)

    there.materialiser.fetch = fetch_slowly  # type: ignore[method-assign]
    adapter = Adapter(1, path, {}, {})
    load(manager, adapter)
    assert fetching.wait(60)
    evict(manager, adapter)
    go.set()
    while manager.jobs.is_busy:
        assert manager.reports(0.1) == []
    assert manager.list_adapters() == set()
    assert not there.is_leased(path.name)


def test_others_are_loaded_while_one_is_fetched(make_manager: Make, there: Node, tmp_path: Path) -> None:
    manager, go = worker_on(make_manager, there), threading.Event()

    def slow(name: str, path: str, uri: str | None = None) -> str:
        assert go.wait(60)
        raise SourceUnavailable("slow")

    there.materialiser.fetch = slow  # type: ignore[method-assign]
    missing = load(manager, Adapter(1, tmp_path / "missing", {}, {}))
    other = load(manager, make_adapter(tmp_path / "other", 2))
    reports: list[Any] = []
    while not reports:
        reports = manager.reports(0.1)
    assert [report.job for report in reports] == [other]
    go.set()
    failed = ended(manager, missing)
    assert isinstance(failed, Failed)
    assert failed.error.code == "L006"
    assert isinstance(bring(manager, make_adapter(tmp_path / "third", 3)), Loaded)
