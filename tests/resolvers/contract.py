"""What every source must do. A source's tests subclass `SourceContract` and give it a harness."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.verify import WEIGHTS_FILE, verify_adapter
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, SourceUnavailable
from lora_plugins.names import AdapterName
from lora_plugins.resolvers.source import Located, Source
from lora_plugins.settings import Settings
from tests.make import BASE, adapter_files, config_bytes


class SourceHarness(ABC):
    """One place that adapters come from, as a test sets it up; the place exists and is empty at first."""

    @abstractmethod
    def make_source(self) -> Source:
        """The source for this place."""

    @abstractmethod
    def put_adapter(self, name: str, files: Mapping[str, bytes]) -> None:
        """Put files where the source looks for `name`; `name` may end in `@revision`."""

    @abstractmethod
    def break_source(self) -> None:
        """From now on the place cannot say what it has."""

    @abstractmethod
    def restore_source(self) -> None:
        """End what `break_source` began; what was put is there again."""


def locate(source: Source, name: str) -> Located | None:
    return asyncio.run(source.locate(AdapterName.parse(name)))


def located(source: Source, name: str) -> Located:
    found = locate(source, name)
    assert found is not None
    return found


def verify(found: Located) -> int:
    """Verify what was located, as the chain does; the rank says which adapter it was."""
    return verify_adapter(found.directory, BASE, Settings(), inside=found.inside).config.rank


def ranked(rank: int) -> dict[str, bytes]:
    from tests.make import weights

    return adapter_files(weights(rank), r=rank)


class SourceContract:
    """Subclasses define the fixture `harness`."""

    @pytest.fixture
    def source(self, harness: SourceHarness) -> Source:
        return harness.make_source()

    def test_an_adapter_is_found_and_can_be_verified(self, harness, source):
        harness.put_adapter("sql", adapter_files())
        found = located(source, "sql")
        assert found.name == AdapterName("sql")
        assert found.source == source.label
        assert found.directory.is_dir()
        assert verify(found) == 4

    def test_the_label_is_one_word_for_logs_and_metrics(self, source):
        assert source.label.isidentifier()

    def test_an_unknown_name_is_none(self, harness, source):
        harness.put_adapter("sql", adapter_files())
        for name in ("sq", "sqll", "SQL", "sql.", "other", "team/sql", "sql/x", "sql/adapter_config.json"):
            assert locate(source, name) is None, name

    def test_an_empty_source_has_nothing(self, source):
        assert locate(source, "sql") is None

    def test_a_nested_name_is_found(self, harness, source):
        harness.put_adapter("team/a/sql", ranked(8))
        harness.put_adapter("sql", ranked(4))
        assert verify(located(source, "team/a/sql")) == 8
        assert verify(located(source, "sql")) == 4

    def test_a_folder_of_adapters_is_none(self, harness, source):
        harness.put_adapter("team/sql", adapter_files())
        assert locate(source, "team") is None

    def test_an_adapter_below_an_adapter_is_its_own(self, harness, source):
        harness.put_adapter("sql", ranked(4))
        harness.put_adapter("sql/checkpoint-10", ranked(8))
        assert verify(located(source, "sql")) == 4
        assert verify(located(source, "sql/checkpoint-10")) == 8

    def test_a_revision_is_found_beside_the_unpinned_adapter(self, harness, source):
        harness.put_adapter("sql", ranked(4))
        harness.put_adapter("sql@v2", ranked(8))
        pinned = located(source, "sql@v2")
        assert pinned.name == AdapterName("sql", "v2")
        assert verify(pinned) == 8
        assert verify(located(source, "sql")) == 4

    def test_an_unknown_revision_is_none(self, harness, source):
        harness.put_adapter("sql", adapter_files())
        for name in ("sql@v9", "sql@refs/pr/1"):
            assert locate(source, name) is None

    def test_a_name_in_another_script_is_found(self, harness, source):
        harness.put_adapter("größe/模型 (2)", adapter_files())
        assert verify(located(source, "größe/模型 (2)")) == 4

    @pytest.mark.parametrize(
        ("files", "kind"),
        [
            ({WEIGHTS_FILE: b"x"}, AdapterNotFound),  # no configuration
            ({CONFIG_FILE: config_bytes()}, AdapterNotFound),  # no weights
            ({CONFIG_FILE: b"{", WEIGHTS_FILE: b""}, InvalidAdapter),
            ({CONFIG_FILE: config_bytes(), WEIGHTS_FILE: b"short"}, InvalidAdapter),
        ],
        ids=["no configuration", "no weights", "broken configuration", "broken weights"],
    )
    def test_a_broken_adapter_is_never_none(self, harness, source, files, kind):
        harness.put_adapter("sql", files)
        with pytest.raises(kind) as caught:
            verify(located(source, "sql"))
        assert isinstance(caught.value, LoRAPluginsError)
        assert caught.value.file in (CONFIG_FILE, WEIGHTS_FILE)

    def test_an_outage_is_never_none(self, harness, source):
        harness.put_adapter("sql", adapter_files())
        harness.break_source()
        try:
            for name in ("sql", "other", "team/other", "sql@v2"):
                with pytest.raises(SourceUnavailable) as caught:
                    locate(source, name)
                assert caught.value.remedy, name
        finally:
            harness.restore_source()

    def test_after_an_outage_it_answers_again(self, harness, source):
        harness.put_adapter("sql", adapter_files())
        harness.break_source()
        with pytest.raises(SourceUnavailable):
            locate(source, "sql")
        harness.restore_source()
        assert verify(located(source, "sql")) == 4
        assert locate(source, "other") is None

    def test_many_may_ask_at_once(self, harness, source):
        harness.put_adapter("sql", adapter_files())

        async def ask() -> list[Located | None]:
            names = [AdapterName.parse(name) for name in ("sql", "other") * 20]
            return await asyncio.gather(*(source.locate(name) for name in names))

        found = asyncio.run(ask())
        assert [item is not None for item in found] == [True, False] * 20
