"""What the file of declared adapters may say, and what is said of a file that cannot be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.lifecycle.declared_file import MAX_BYTES, parse, read_bytes
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.resolvers.sources.uri import AllowedUris

ALLOWED = AllowedUris.parse(("s3://adapters", "hf://acme", "file:///srv"))
PATH = Path("/etc/lora/adapters.yaml")


def test_each_field_is_read_in_the_order_of_the_file() -> None:
    text = b"""
adapters:
  - {name: team/sql, preload: true}
  - name: support
    uri: s3://adapters/support/v3
    digest: 9c12fc445e5a2d8b9c12fc445e5a2d8b9c12fc445e5a2d8b9c12fc445e5a2d8b
    pin: true
  - name: legal
    uri: hf://acme/legal/folder
    revision: v2.1
"""
    found = parse(text, PATH, ALLOWED)
    assert list(found) == ["team/sql", "support", "legal"]
    assert found["team/sql"] == DesiredAdapter("team/sql")
    assert found["support"] == DesiredAdapter(
        "support", "s3://adapters/support/v3", "9c12fc445e5a2d8b" * 4, is_pinned=True
    )
    assert found["legal"].uri == "hf://acme/legal@v2.1/folder"
    assert [adapter.is_awaited for adapter in found.values()] == [True, False, False]


@pytest.mark.parametrize("text", [b"adapters: []", b"adapters:\n", b'{"adapters": []}'])
def test_none_may_be_declared(text: bytes) -> None:
    assert parse(text, PATH, ALLOWED) == {}


WRONG = {
    b"": "an empty file",
    b"# nothing": "an empty file",
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
    b"adapters: [{name: sql, uri: 's3://adapters/sql', revision: v1}]": "a revision without an hf:// URI",
    b"adapters: [{name: sql, uri: 'hf://acme/sql@v1', revision: v2}]": "a revision beside one in the URI",
    b"adapters: [{name: sql, uri: 'file:///srv/../etc'}]": "'sql'",
    b"x: &x [*x]\nadapters: *x": "entry 1",
    b"[" * 5000: "no YAML",
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
