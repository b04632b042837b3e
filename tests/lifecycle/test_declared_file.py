"""What the file of declared adapters may say, and what is said of a file that cannot be right.

A large file is parsed by another process: adapters and errors as of this one, whatever becomes of the process.
"""

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
from lora_plugins.lifecycle.declared_file import MAX_BYTES, parse, parse_apart, read_bytes
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.resolvers.sources.uri import AllowedUris
from lora_plugins.settings import Settings
from lora_plugins.verification.children import Children
from tests.make import adapter_files, put

ALLOWED = AllowedUris.parse(("s3://adapters", "hf://acme", "file:///srv"))
PATH = Path("/etc/lora/adapters.yaml")


@pytest.mark.parametrize("text", [b"adapters: []", b"adapters:\n", b'{"adapters": []}'])
def test_none_may_be_declared(text: bytes) -> None:
    assert parse(text, PATH, ALLOWED) == {}


WRONG = {
    b"": "an empty file",
    b"adapters: [": "no YAML: line 1: expected",
    b"foo: 1": "the key 'adapters' is missing; foo: not known",
    b"\xff\xfe\x00": "no YAML",
    b"- name: sql": "the file: not a mapping",
    b"adapters: {name: sql}": "the file: not a list",
    b"adaptors: []": "adaptors: not known, did you mean 'adapters'?",
    b"adapters: [sql]": "entry 1: not a mapping, such as {name: sql}",
    b"adapters: [{}]": "entry 1, name: is missing",
    b"adapters: [{name: sql, preloaded: true}]": "did you mean 'preload'?",
    b"adapters: [{name: 1}]": "entry 1, name: not a text; put it into quotes",
    b"adapters: [{name: sql, pin: 1}]": "entry 1, pin: neither true nor false",
    b"adapters: [{name: sql}, {name: sql}]": "'sql' twice",
    b"adapters: [{name: ../sql}]": "'../sql'",
    b"adapters: [{name: sql, digest: 12345678}]": "entry 1, digest",  # YAML reads a number
    b"adapters: [{name: sql, digest: xyz}]": "entry 1, digest: not a digest",
    b"adapters: [{name: sql, digest: 9c12fc445e5a}]": "'sql': 12 characters of a digest; expected all 64",
    b"adapters: [{name: sql, uri: 's3://elsewhere/sql'}]": "a URI that is not allowed",
    b"adapters: [{name: sql, uri: 'sql'}]": "no URI",
    b"adapters: [{name: sql, revision: v1}]": "a revision without an hf:// URI",
    b"adapters: [{name: sql, uri: 'hf://acme/sql@v1', revision: v2}]": "a revision beside one in the URI",
    b"adapters: [{name: sql, uri: 'file:///srv/../etc'}]": "'sql'",
    b"x: &x [*x]\nadapters: *x": "entry 1",
    b"[" * 1500: "no YAML",
    b"!!python/object/apply:os.system [ls]": "no YAML",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:40].decode(errors="replace"))
def test_wrong_file_is_refused_as_a_whole(text: bytes) -> None:
    with pytest.raises(InvalidSettings) as caught:
        parse(text, PATH, ALLOWED)
    assert WRONG[text] in str(caught.value)
    assert "LORA_PLUGINS_ADAPTERS_FILE=/etc/lora/adapters.yaml" in caught.value.found
    assert caught.value.expected


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="No such file"):
        read_bytes(tmp_path / "missing")
    (tmp_path / "large").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(InvalidSettings, match="at most"):
        read_bytes(tmp_path / "large")


# --- large files

URIS = ("s3://adapters/ünïcode folder", "hf://acme")
APART = Path("/etc/lora/adapters\udcff.yaml")
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
    uri = "s3://adapters/ünïcode folder/v1"
    sql = f"{{name: team/sql, uri: '{uri}', digest: {'ab' * 32}, pin: true}}"
    legal = "{name: legal, uri: 'hf://acme/legal/folder', revision: v2.1}"
    found = parse_apart(text_of("{name: zoo, preload: true}", sql, legal), APART, URIS)
    assert list(found.items()) == [
        ("zoo", DesiredAdapter("zoo")),
        ("team/sql", DesiredAdapter("team/sql", uri, "ab" * 32, is_pinned=True)),
        ("legal", DesiredAdapter("legal", "hf://acme/legal@v2.1/folder")),
    ]
    assert [adapter.is_awaited for adapter in found.values()] == [True, False, False]


@pytest.mark.parametrize(
    "text",
    [text_of("{name: sql", "  - {"), text_of("{name: sql, pinned: true}"), text_of("{name: ../sql}"),
     text_of("{name: sql, uri: 's3://elsewhere/sql'}"), PADDING],
    ids=["YAML", "field", "name", "URI", "empty"],
)  # fmt: skip
def test_errors_are_those_of_this_process(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings) as here:
        parse(text, APART, AllowedUris.parse(URIS))
    monkeypatch.setattr(yaml, "safe_load", lambda _: pytest.fail("parsed in this process"))
    with pytest.raises(InvalidSettings) as apart:
        parse_apart(text, APART, URIS)
    assert apart.value.fields() == here.value.fields()


@pytest.mark.usefixtures("never_here")
def test_a_file_that_is_too_deep_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="no YAML: maximum recursion depth"):
        parse_apart(PADDING + b"[" * 1500, APART, URIS)


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
    assert list(parse_apart(text_of("{name: sql}"), APART, URIS)) == ["sql"]
    (pid,) = no_process_yet.pids()
    assert no_process_yet.read(put(tmp_path / "sql", adapter_files()), Settings()).result(60)
    assert no_process_yet.pids() == [pid]
    maps = {mapped.path for mapped in psutil.Process(pid).memory_maps()}
    assert not [path for path in maps if "/torch/" in path or "/vllm/" in path]


def test_a_small_file_starts_no_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert list(parse_apart(b"adapters: [{name: sql}]", APART, URIS)) == ["sql"]
    assert not caplog.records
