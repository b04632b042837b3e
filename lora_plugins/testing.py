# ruff: noqa: S101 - tests assert
"""Tests of the duties of a source; a source's package runs `class TestMine(SourceContract)` with a fixture `harness`.

Nothing here needs pytest; pytest collects the methods that begin with `test_`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from pathlib import Path

from lora_plugins.absence import Absence
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source, VersionChanged
from lora_plugins.store.partial_download import PartialDownload

FILES: Mapping[str, bytes] = {CONFIG_FILE: b'{"r": 4}', WEIGHTS_FILE: b"weights " * 1000}
OTHER_FILES: Mapping[str, bytes] = {CONFIG_FILE: b'{"r": 8}', WEIGHTS_FILE: b"WEIGHTS " * 1000}
_BASE = "org/base"


class SourceHarness(ABC):
    """A place of adapters, as a test sets it up; the place exists and is empty at first."""

    # Whether one version stands for everything in the place, as a commit does.
    commits = False

    @abstractmethod
    def make_source(self) -> Source:
        """Return the source for this place."""

    @abstractmethod
    def put_adapter(self, name: str, files: Mapping[str, bytes]) -> None:
        """Add or replace files where the source looks for `name`; `name` may end in `@revision`."""

    @abstractmethod
    def break_source(self) -> None:
        """Have the place answer nothing from now on."""

    @abstractmethod
    def restore_source(self) -> None:
        """End the outage of `break_source`; the adapters are there again."""

    def asked(self, name: str) -> str:
        """Return a request's spelling of the contract's `name`, where the place allows only some names."""
        return name

    def settle(self) -> None:  # noqa: B027 - most have none
        """Wait until the source's own threads have ended, after a fetch has ended."""


class SourceContract:
    """Subclasses define the fixture `harness`, a new `SourceHarness` for each test."""

    def test_the_label_is_one_word_for_logs_and_metrics(self, harness: SourceHarness) -> None:
        """And the source prints as its label, with the source's place in brackets."""
        source = harness.make_source()
        assert source.label.isidentifier()
        assert str(source).startswith(f"{source.label} (")

    def test_it_says_whether_asking_costs_a_round_trip(self, harness: SourceHarness) -> None:
        """`remote`."""
        assert isinstance(harness.make_source().remote, bool)

    def test_an_adapter_is_located_and_fetched(self, harness: SourceHarness, tmp_path: Path) -> None:
        """All of its files and no others, in their sizes."""
        harness.put_adapter("team/sql", {**FILES, "README.md": b"x", "optimizer.pt": b"y" * 99})
        source = harness.make_source()
        found = located(source, harness, "team/sql")
        assert (found.name, found.source) == (AdapterName.parse(harness.asked("team/sql")), source.label)
        assert {file.name: file.size_bytes for file in found.files} == {n: len(data) for n, data in FILES.items()}
        assert "://" in found.uri
        assert fetched(source, found, tmp_path / "download") == FILES

    def test_an_unknown_name_is_an_absence(self, harness: SourceHarness) -> None:
        """With its source and place, and never an error."""
        harness.put_adapter("sql", FILES)
        source = harness.make_source()
        for name in ("sq", "sqll", "SQL", "sql.", "team/other", "sql/x", "sql/adapter_config.json", "sql@v9", "sq?"):
            absence = asyncio.run(source.locate(AdapterName.parse(harness.asked(name)), _BASE))
            assert isinstance(absence, Absence), name
            assert absence.source == source.label
            assert absence.detail

    def test_an_outage_is_never_an_absence(self, harness: SourceHarness) -> None:
        """`SourceUnavailable`, with a remedy; afterwards the source answers again."""
        harness.put_adapter("sql", FILES)
        source = harness.make_source()
        harness.break_source()
        try:
            for name in ("sql", "team/other", "sql@v2"):
                asked = source.locate(AdapterName.parse(harness.asked(name)), _BASE)
                assert asyncio.run(_refusal(asked)).remedy, name
        finally:
            harness.restore_source()
        assert located(source, harness, "sql")

    def test_an_outage_before_the_fetch_is_said(self, harness: SourceHarness, tmp_path: Path) -> None:
        """`SourceUnavailable`, and not `VersionChanged`."""
        harness.put_adapter("sql", FILES)
        source = harness.make_source()
        found = located(source, harness, "sql")
        directory = tmp_path / "download"
        directory.mkdir()
        harness.break_source()
        try:
            refusal = asyncio.run(_refusal(source.fetch(found, PartialDownload(directory, list(FILES)))))
        finally:
            harness.settle()
            harness.restore_source()
        assert not isinstance(refusal, VersionChanged)

    def test_a_version_is_the_same_until_its_bytes_change(self, harness: SourceHarness) -> None:
        """Other bytes of the same sizes are another version."""
        harness.put_adapter("sql", FILES)
        source = harness.make_source()
        first = located(source, harness, "sql")
        assert located(source, harness, "sql") == first
        for file in FILES:
            before = located(source, harness, "sql")
            harness.put_adapter("sql", {file: OTHER_FILES[file]})
            after = located(source, harness, "sql")
            assert (after.uri, after.name) == (before.uri, before.name)
            assert after.version != before.version

    def test_what_changed_since_it_was_located_is_not_mixed(self, harness: SourceHarness, tmp_path: Path) -> None:
        """`VersionChanged`, or the files that were located."""
        harness.put_adapter("sql", FILES)
        source = harness.make_source()
        found = located(source, harness, "sql")
        harness.put_adapter("sql", OTHER_FILES)
        with contextlib.suppress(VersionChanged):
            assert fetched(source, found, tmp_path / "download") == FILES

    def test_many_may_ask_at_once(self, harness: SourceHarness) -> None:
        """In one event loop."""
        harness.put_adapter("sql", FILES)
        source = harness.make_source()

        async def ask() -> list[RemoteAdapter | Absence]:
            names = [AdapterName.parse(harness.asked(name)) for name in ("sql", "other") * 20]
            return await asyncio.gather(*(source.locate(name, _BASE) for name in names))

        assert [isinstance(answer, RemoteAdapter) for answer in asyncio.run(ask())] == [True, False] * 20


def located(source: Source, harness: SourceHarness, name: str) -> RemoteAdapter:
    found = asyncio.run(source.locate(AdapterName.parse(harness.asked(name)), _BASE))
    assert isinstance(found, RemoteAdapter)
    return found


def fetched(source: Source, adapter: RemoteAdapter, directory: Path) -> dict[str, bytes]:
    """Return the files that the source writes into a new directory."""
    directory.mkdir()
    download = PartialDownload(directory, [file.name for file in adapter.files])
    try:
        asyncio.run(source.fetch(adapter, download))
    finally:
        download.finish_quietly()
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def _refusal(work: Awaitable[object]) -> SourceUnavailable:
    try:
        await work
    except SourceUnavailable as error:
        return error
    raise AssertionError("an outage that nothing says")
