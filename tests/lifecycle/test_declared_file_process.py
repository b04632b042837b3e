"""A file that another process parses: adapters and errors as of this one, whatever becomes of the process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from lora_plugins.errors import InvalidSettings
from lora_plugins.lifecycle import declared_file
from lora_plugins.lifecycle.declared_file import parse, parse_apart
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.resolvers.sources.uri import AllowedUris
from lora_plugins.settings import Settings
from lora_plugins.verification.children import Children
from tests.make import adapter_files, put

URIS = ("s3://adapters/ünïcode folder", "hf://acme")
PATH = Path("/etc/lora/adapters\udcff.yaml")
PADDING = b"# a comment that makes the file a large one\n" * 100


@pytest.fixture
def never_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "safe_load", lambda _: pytest.fail("parsed in this process"))


@pytest.fixture
def no_process_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    made = Children()
    monkeypatch.setattr(declared_file, "children", lambda: made)
    yield made
    made.end()


def text_of(*entries: str) -> bytes:
    return PADDING + b"adapters:\n" + "".join(f"  - {entry}\n" for entry in entries).encode()


@pytest.mark.usefixtures("never_here")
def test_each_field_comes_back_in_order() -> None:
    found = parse_apart(
        text_of(
            "{name: zoo, preload: true}",
            f"{{name: team/sql, uri: 's3://adapters/ünïcode folder/v1', digest: {'ab' * 32}, pin: true}}",
            "{name: legal, uri: 'hf://acme/legal', revision: v2}",
        ),
        PATH,
        URIS,
    )
    assert list(found.values()) == [
        DesiredAdapter("zoo"),
        DesiredAdapter("team/sql", "s3://adapters/ünïcode folder/v1", "ab" * 32, is_pinned=True),
        DesiredAdapter("legal", "hf://acme/legal@v2"),
    ]
    assert list(found) == ["zoo", "team/sql", "legal"]
    assert [adapter.is_awaited for adapter in found.values()] == [True, False, False]


@pytest.mark.parametrize(
    "text",
    [text_of("{name: sql", "  - {"), text_of("{name: sql, pinned: true}"), text_of("{name: ../sql}"),
     text_of("{name: sql, uri: 's3://elsewhere/sql'}"), PADDING],
    ids=["YAML", "field", "name", "URI", "empty"],
)  # fmt: skip
def test_errors_are_those_of_this_process(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings) as here:
        parse(text, PATH, AllowedUris.parse(URIS))
    monkeypatch.setattr(yaml, "safe_load", lambda _: pytest.fail("parsed in this process"))
    with pytest.raises(InvalidSettings) as apart:
        parse_apart(text, PATH, URIS)
    assert apart.value.fields() == here.value.fields()


@pytest.mark.usefixtures("never_here")
def test_a_file_that_is_too_deep_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="no YAML: maximum recursion depth"):
        parse_apart(PADDING + b"[" * 5000, PATH, URIS)


@pytest.mark.usefixtures("no_process_yet")
@pytest.mark.parametrize("executable", ["", "/nowhere/python", "/bin/false", "/bin/true", "/bin/echo"])
def test_without_another_process_it_is_parsed_here(
    executable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert parse_apart(text_of("{name: sql}"), Path("/etc/adapters.yaml"), URIS) == {"sql": DesiredAdapter("sql")}
    assert "the server itself does" in caplog.text


def test_the_process_reads_adapters_afterwards(no_process_yet: Children, tmp_path: Path) -> None:
    assert list(parse_apart(text_of("{name: sql}"), PATH, URIS)) == ["sql"]
    (pid,) = no_process_yet.pids()
    assert no_process_yet.read(put(tmp_path / "sql", adapter_files()), Settings()).result(60)
    assert no_process_yet.pids() == [pid]
    maps = {mapped.path for mapped in psutil.Process(pid).memory_maps()}
    assert not [path for path in maps if "/torch/" in path or "/vllm/" in path]


def test_a_small_file_starts_no_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert list(parse_apart(b"adapters: [{name: sql}]", PATH, URIS)) == ["sql"]
    assert not caplog.records
