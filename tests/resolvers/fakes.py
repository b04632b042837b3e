"""Sources, a resolver and a clock that a test steers; what the tests of resolvers share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lora_plugins.absence import Absence
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.events import Events, FetchEnded, FetchStarted
from lora_plugins.observability.logs import LogEvents
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.source import RemoteAdapter, SourceFile, VersionChanged, version_of
from lora_plugins.settings import Settings
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store
from tests.make import BASE, adapter_files

Files = Mapping[str, bytes]
GOOD = adapter_files()
BROKEN = {**GOOD, CONFIG_FILE: b"{"}


class FakeSource:
    """Serves files or raises errors from a table of names, and remembers what it was asked."""

    def __init__(self, label: str, answers: Mapping[str, Files | Exception] | None = None, *, remote: bool = True):
        self.label = label
        self.remote = remote
        self.answers = dict(answers or {})
        self.asked: list[str] = []
        self.asked_for_base: list[str] = []
        self.fetched: list[str] = []
        self.fetched_files: list[str] = []
        self.while_fetching: Callable[[], object] = lambda: None
        self.gate: asyncio.Event | None = None

    def __str__(self) -> str:
        return f"{self.label} ({self.label}://)"

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        self.asked.append(str(name))
        self.asked_for_base.append(base_model_name)
        answer = self.answers.get(str(name))
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return Absence(self.label, f"{self.label}://{name}", "nothing")
        files = tuple(SourceFile(file, len(data), str(hash(data))) for file, data in answer.items())
        return RemoteAdapter(name, self.label, f"{self.label}://{name}", version_of(files), files)

    async def fetch(self, located: RemoteAdapter, arriving: PartialDownload) -> None:
        if not located.is_rest:  # once for each version: the weights come in a call of their own
            self.fetched.append(str(located.name))
        if self.gate is not None:
            await self.gate.wait()
        self.while_fetching()
        for file in located.files:
            self.fetched_files.append(file.name)
            data = self.answers[str(located.name)][file.name]
            if str(hash(data)) != file.etag:
                raise VersionChanged("other bytes")
            (arriving.directory / file.name).write_bytes(data)


def failing(error: Exception) -> Callable[[], None]:
    """What raises this error."""

    def fail() -> None:
        raise error

    return fail


class RecordingResolver(AdapterResolver):
    def __init__(self, root: Path, *sources: FakeSource, max_bytes: int | None = None, **settings: object) -> None:
        self.emitted: list[object] = []  # all but what bars of progress are drawn by
        store = Store(root, max_bytes=max_bytes)
        super().__init__(Settings(**settings), Events(self.record, LogEvents()), store, sources)
        self.base = BASE

    def record(self, event: object) -> None:
        if not isinstance(event, FetchStarted | FetchEnded):
            self.emitted.append(event)

    def ask(self, name: str = "sql"):
        return asyncio.run(self.resolve(name, BASE.path))

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.emitted]


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Readings:
    """What reading processes are asked for: every directory, those with weights to read, and the most at once."""

    asked: list[Path] = field(default_factory=list)
    of_weights: list[Path] = field(default_factory=list)
    most: int = 0
