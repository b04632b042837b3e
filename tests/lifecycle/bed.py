"""A server over a real store, whose adapters come from a made-up source, and whose copies are damaged."""

from __future__ import annotations

from pathlib import Path

from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.events import StoreDamaged
from lora_plugins.lifecycle.registry import ServedAdapter
from lora_plugins.store.eviction import damaged_in
from lora_plugins.store.store import Store
from tests.lifecycle.world import World
from tests.make import adapter_files
from tests.resolvers.test_damage import flip
from tests.resolvers.test_resolver import FakeSource, RecordingResolver

GOOD = adapter_files()
LAST_BIT = 8 * len(GOOD[WEIGHTS_FILE]) - 1


class Bed:
    """A server with the real resolver, store and planner; the name `sql` is served from its source."""

    def __init__(self, root: Path, **options: object) -> None:
        self.root = root
        self.source = FakeSource("s3", {"sql": GOOD})
        self.resolver = RecordingResolver(root, self.source, **options)
        self.world = World(resolver=self.resolver)
        self.copies = self.world.lifecycle.copies

    async def load(self, name: str = "sql") -> ServedAdapter:
        adapter = await self.world.load(name)
        await self.copies.look()
        return adapter

    def damage(self, adapter: ServedAdapter) -> None:
        assert adapter.version is not None
        flip(adapter.version.path / WEIGHTS_FILE, LAST_BIT)

    def verify(self, adapter: ServedAdapter) -> bool:
        """As the command line does, in another process."""
        assert adapter.version is not None
        return Store(self.root).verify(adapter.version.digest)

    def find_damage(self, adapter: ServedAdapter) -> None:
        """Damage the files, and have another process find so."""
        self.damage(adapter)
        assert not self.verify(adapter)

    async def replaced_elsewhere(self, adapter: ServedAdapter) -> None:
        """Damage found, and mended by another server."""
        self.find_damage(adapter)
        await RecordingResolver(self.root, FakeSource("s3", {"sql": GOOD})).resolve("sql", "/base")
        assert damaged_in(self.resolver.store.layout) == set()

    @property
    def loads(self) -> int:
        return self.world.worker.loads.total()

    @property
    def damages(self) -> int:
        return sum(isinstance(event, StoreDamaged) for event in self.resolver.emitted)
