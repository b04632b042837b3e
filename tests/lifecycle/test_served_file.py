"""What was served, written and read again, and files that nobody can read."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from lora_plugins.lifecycle import served_file
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.lifecycle.served_file import ServedFile

SERVED = [
    DesiredAdapter("sql"),
    DesiredAdapter("team/ünïcode", "s3://b/x", "aa" * 32, is_pinned=True),
]


def test_what_is_written_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ServedFile.of_store(tmp_path, "org/base", "lora-0")
    assert file.read() == []
    file.write(SERVED)
    assert ServedFile.of_store(tmp_path, "org/base", "lora-0").read() == SERVED
    file.write(SERVED[:1])
    assert file.read() == SERVED[:1]
    file.write([])
    assert file.read() == []
    assert not caplog.records
    assert [entry.name for entry in file.path.parent.iterdir()] == [file.path.name], "nothing half written is left"


def test_replicas_with_one_process_id_write_different_scratch_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        ServedFile.of_store(tmp_path, "org/base", "lora-0"),
        ServedFile.of_store(tmp_path, "org/base", "lora-0"),
    )
    replace = os.replace

    def replace_after_the_other(scratch: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        second.write(SERVED[:1])  # from its beginning to its end, while the first stands before its last step
        replace(scratch, path)

    monkeypatch.setattr(os, "replace", replace_after_the_other)
    first.write(SERVED)
    assert first.read() == SERVED, "the last one that comes to its end wins"
    assert [entry.name for entry in first.path.parent.iterdir()] == [first.path.name]


def test_each_base_model_has_its_own(tmp_path: Path) -> None:
    ServedFile.of_store(tmp_path, "org/base", "lora-0").write(SERVED)
    assert ServedFile.of_store(tmp_path, "org/other", "lora-0").read() == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 99, "served": [\n]}\n', '{"format": 1, "served": []}', "\x00\xff",
     '{"format": 1, "served": [\n', '{"format": 1, "served": [\n]}', '{"format": 1, "served": [\n{"name": "sq'],
)  # fmt: skip
def test_an_unreadable_file_is_empty_and_logs_a_warning(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = ServedFile(tmp_path / "x.json")
    file.path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert file.read() == []
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 3),
        ("is_pinned", "host"),
        ("last_digest", ["2" * 64]),
        ("uri", {"place": "s3://a/chat"}),
        ("held_digest", {"sha512": "1" * 128}),
    ],
)
def test_a_field_of_another_type_hides_no_other_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str, value: object
) -> None:
    """Another release may have written it. Without the field, a name would stand for another version."""
    file = ServedFile(tmp_path / "x.json")
    chat = DesiredAdapter("chat", "s3://a/chat", "1" * 64, True, last_digest="2" * 64)
    file.write([DesiredAdapter("sql"), chat, DesiredAdapter("code")])
    first, *lines, last = file.path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1].rstrip(",")) | {field: value}) + ","
    file.path.write_text("\n".join([first, *lines, last, ""]))
    served_file._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert file.read() == [DesiredAdapter("sql"), DesiredAdapter("code")]
    assert caplog.text.count(f"$.{field}") == 1


def test_fields_of_a_later_release_count_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ServedFile(tmp_path / "x.json")
    file.path.write_text('{"format": 1, "served": [\n{"name": "sql", "colour": "red"}\n]}\n')
    assert file.read() == [DesiredAdapter("sql")]
    assert not caplog.records


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    file = ServedFile(tmp_path / "x.json")
    file.write(SERVED)
    (tmp_path / "y").write_text("a file")
    with pytest.raises(OSError):
        ServedFile(tmp_path / "y" / "x.json").write(SERVED)
    assert file.read() == SERVED


def test_what_has_not_changed_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, written = ServedFile(tmp_path / "x.json"), []
    replace_small = served_file.replace_small
    monkeypatch.setattr(served_file, "replace_small", lambda *text: (written.append(text), replace_small(*text)))
    for served in (SERVED, SERVED, SERVED[:1], SERVED[:1], SERVED):
        file.write(served)
        assert file.read() == served
    assert len(written) == 3
    file.path.unlink()
    file.write(SERVED)
    assert file.read() == SERVED, "it was away"


def test_what_failed_to_be_written_is_tried_again(tmp_path: Path) -> None:
    file = ServedFile(tmp_path / "y" / "x.json")
    (tmp_path / "y").write_text("a file")
    with pytest.raises(OSError):
        file.write(SERVED)
    (tmp_path / "y").unlink()
    file.write(SERVED)
    assert file.read() == SERVED


def test_many_names_are_read_in_pieces(tmp_path: Path) -> None:
    """No piece of JSON is long enough to keep the interpreter's lock from others."""
    file, served = ServedFile(tmp_path / "x.json"), [DesiredAdapter(f"sql-{number}") for number in range(2_000)]
    file.write(served)
    pieces = list(file.pieces())
    assert [adapter for piece in pieces for adapter in piece] == served
    assert max(map(len, pieces)) <= 500
    document = json.loads(file.path.read_text())
    assert (document["format"], len(document["served"])) == (1, 2_000)


def test_a_broken_line_hides_no_other_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ServedFile(tmp_path / "x.json")
    file.write([DesiredAdapter("sql"), DesiredAdapter("chat"), DesiredAdapter("code")])
    file.path.write_text(file.path.read_text().replace('"chat"', '"chat'))
    served_file._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert file.read() == [DesiredAdapter("sql"), DesiredAdapter("code")]
    assert "cannot be read" in caplog.text


def test_a_file_that_was_cut_off_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ServedFile(tmp_path / "x.json")
    file.write(SERVED)
    file.path.write_text(file.path.read_text().removesuffix("]}\n"))
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert file.read() == SERVED
    assert "cannot be read" in caplog.text
