"""What was served, written and read again, and files that nobody can read."""

from __future__ import annotations

import json
import logging
import os
import resource
from dataclasses import astuple
from pathlib import Path

import pytest

from lora_plugins.lifecycle import served_file
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.lifecycle.served_file import ServedFile
from tests.repetitions import times

SERVED = [DesiredAdapter("sql"), DesiredAdapter("team/ünïcode", "s3://b/x", "aa" * 32, is_pinned=True)]


def written(file: ServedFile, served: list[DesiredAdapter]) -> None:
    file.write(map(astuple, served))


@pytest.fixture
def file(tmp_path: Path) -> ServedFile:
    return ServedFile(tmp_path / "x.json")


def test_what_is_written_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ServedFile.of_store(tmp_path, "org/base", "lora-0")
    assert file.read() == []
    written(file, SERVED)
    assert ServedFile.of_store(tmp_path, "org/base", "lora-0").read() == SERVED
    written(file, SERVED[:1])
    assert file.read() == SERVED[:1]
    written(file, [])
    assert file.read() == []
    assert not caplog.records
    assert [entry.name for entry in file.path.parent.iterdir()] == [file.path.name], "nothing half written is left"


def test_replicas_with_one_process_id_write_different_scratch_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (ServedFile.of_store(tmp_path, "org/base", "lora-0") for _ in range(2))
    replace = os.replace

    def replace_after_the_other(scratch: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        written(second, SERVED[:1])  # from its beginning to its end, while the first stands before its last step
        replace(scratch, path)

    monkeypatch.setattr(os, "replace", replace_after_the_other)
    written(first, SERVED)
    assert first.read() == SERVED, "the last one that comes to its end wins"
    assert [entry.name for entry in first.path.parent.iterdir()] == [first.path.name]


def test_each_base_model_has_its_own(tmp_path: Path) -> None:
    ServedFile.of_store(tmp_path, "org/base", "lora-0").write(map(astuple, SERVED))
    assert ServedFile.of_store(tmp_path, "org/other", "lora-0").read() == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 99, "served": [\n]}\n', '{"format": 1, "served": []}', "\x00\xff",
     '{"format": 1, "served": [\n', '{"format": 1, "served": [\n]}', '{"format": 1, "served": [\n{"name": "sq'],
)  # fmt: skip
def test_an_unreadable_file_is_empty_and_logs_a_warning(
    file: ServedFile, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert file.read() == []
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("", "a broken line"),
        ("name", 3),
        ("is_pinned", "host"),
        ("last_digest", ["2" * 64]),
        ("uri", {"place": "s3://a/chat"}),
        ("held_digest", {"sha512": "1" * 128}),
    ],
)
def test_a_field_of_another_type_hides_no_other_name(
    file: ServedFile, caplog: pytest.LogCaptureFixture, field: str, value: object
) -> None:
    """Another release may have written it. Without the field, a name would stand for another version."""
    chat = DesiredAdapter("chat", "s3://a/chat", "1" * 64, True, last_digest="2" * 64)
    written(file, [DesiredAdapter("sql"), chat, DesiredAdapter("code")])
    first, *lines, last = file.path.read_text().splitlines()
    changed = json.dumps(json.loads(lines[1].rstrip(",")) | {field: value}) + ","
    lines[1] = changed if field else changed.replace('"', "")
    file.path.write_text("\n".join([first, *lines, last, ""]))
    served_file._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert file.read() == [DesiredAdapter("sql"), DesiredAdapter("code")]
    assert caplog.text.count(f"$.{field}" if field else "cannot be read") == 1


def test_fields_of_a_later_release_count_for_nothing(file: ServedFile, caplog: pytest.LogCaptureFixture) -> None:
    file.path.write_text('{"format": 1, "served": [\n{"name": "sql", "colour": "red"}\n]}\n')
    assert file.read() == [DesiredAdapter("sql")]
    assert not caplog.records


def test_what_has_not_changed_is_not_written_again(file: ServedFile) -> None:
    for served in (SERVED, SERVED[:1], []):
        written(file, served)
        before = file.path.stat()
        written(file, served)
        assert file.read() == served
        assert file.path.stat() == before
    file.path.unlink()
    written(file, SERVED)
    assert file.read() == SERVED, "it was away"


# --- changes after the last line


def by_name(served: list[DesiredAdapter]) -> list[DesiredAdapter]:
    return sorted(served, key=lambda entry: entry.name)


def changed(names: int, **changes: DesiredAdapter | None) -> list[DesiredAdapter]:
    """Many names with changes: other entries, more entries, or (None) one name fewer."""
    entries: dict[str, DesiredAdapter | None] = {f"sql_{n}": DesiredAdapter(f"sql_{n}") for n in range(names)}
    return [entry for entry in (entries | changes).values() if entry is not None]


CHANGES: list[dict[str, DesiredAdapter | None]] = [
    {"sql_7": DesiredAdapter("sql_7", last_digest="aa" * 32)},
    {"sql_7": None},
    {"chat": DesiredAdapter("chat", "s3://b/ünïcode", is_pinned=True)},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_a_change_is_appended_and_survives(file: ServedFile, changes: dict[str, DesiredAdapter | None]) -> None:
    written(file, changed(1_000))
    before = file.path.read_bytes()
    written(file, served := changed(1_000, **changes))
    after = file.path.read_bytes()
    assert after.startswith(before)
    assert len(after) < len(before) + 300
    assert by_name(ServedFile(file.path).read()) == by_name(served)
    written(file, changed(1_000))
    assert by_name(ServedFile(file.path).read()) == by_name(changed(1_000)), "the last entry of a name counts"


@pytest.mark.parametrize("rest", ["nothing", "zeros"])
def test_an_append_cut_off_anywhere_leaves_before_or_after(tmp_path: Path, rest: str) -> None:
    """Some file systems make the new length durable before the new content."""
    file, path = ServedFile(tmp_path / "x.json"), tmp_path / "cut.json"
    for changes in CHANGES:
        written(file, served := changed(10))
        before = len(file.path.read_bytes())
        written(file, later := changed(10, **changes))
        after = file.path.read_bytes()
        for end in sorted({*range(before, len(after), times(1, short=11)), before + 1, len(after) - 2, len(after) - 1}):
            path.write_bytes(after[:end] + bytes(len(after) - end if rest == "zeros" else 0))
            again = ServedFile(path)
            assert by_name(again.read()) in (by_name(served), by_name(later))
            written(again, later)
            assert again.read() == later, "whatever a crash has left is replaced"


def test_an_append_that_failed_half_way_is_made_good(file: ServedFile) -> None:
    written(file, changed(100))
    later = changed(100, sql_7=DesiredAdapter("sql_7", f"s3://{'b' * 200}"))
    no_limit, size_bytes = resource.getrlimit(resource.RLIMIT_FSIZE), file.path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + 100, no_limit[1]))  # as a disk that gets full
    try:
        for _ in range(2):
            with pytest.raises(OSError):
                written(file, later)
            assert file.path.stat().st_size == size_bytes + 100
            assert file.read() == changed(100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    written(file, later)
    assert file.read() == later
    assert b"\0" not in file.path.read_bytes()


@pytest.mark.parametrize("changes", [*CHANGES, {f"chat_{n}": DesiredAdapter(f"chat_{n}") for n in range(501)}])
def test_a_reader_sees_what_was_there_when_it_began(
    file: ServedFile, changes: dict[str, DesiredAdapter | None]
) -> None:
    """Another replica reads in pieces, between which changes are appended, or all is written again."""
    written(file, changed(2_000))
    pieces = ServedFile(file.path).pieces()
    read = next(pieces)
    written(file, later := changed(2_000, **changes))
    assert [*read, *(entry for piece in pieces for entry in piece)] == changed(2_000)
    assert by_name(file.read()) == by_name(later)


def test_after_many_changes_all_is_written_again(file: ServedFile) -> None:
    written(file, changed(3))
    sizes_bytes = []
    for number in range(1, 1_502):
        written(file, served := changed(3, sql_1=DesiredAdapter("sql_1", last_digest=f"{number:064}")))
        sizes_bytes.append(file.path.stat().st_size)
    assert ServedFile(file.path).read() == [served[0], served[2], served[1]]
    assert [number for number in range(1, 1_501) if sizes_bytes[number] < sizes_bytes[number - 1]] == [500, 1001]
    assert sizes_bytes[1001] == sizes_bytes[500] < 1_000


def test_the_file_of_another_writer_is_not_appended_to(tmp_path: Path) -> None:
    """Two servers with one `LORA_PLUGINS_REPLICA`, say while one takes over from the other: the last one wins."""
    first, second = ServedFile(tmp_path / "x.json"), ServedFile(tmp_path / "x.json")
    written(first, changed(3))
    written(second, SERVED)
    written(first, served := changed(3, **CHANGES[2]))
    assert first.read() == served
    written(second, SERVED)
    assert first.read() == SERVED


def test_what_failed_to_be_written_is_tried_again(tmp_path: Path) -> None:
    file = ServedFile(tmp_path / "y" / "x.json")
    (tmp_path / "y").write_text("a file")
    with pytest.raises(OSError):
        written(file, SERVED)
    (tmp_path / "y").unlink()
    written(file, SERVED)
    assert file.read() == SERVED


def test_many_names_are_read_in_pieces(tmp_path: Path) -> None:
    """No piece of JSON is long enough to keep the interpreter's lock from others."""
    file, served = ServedFile(tmp_path / "x.json"), [DesiredAdapter(f"sql-{number}") for number in range(2_000)]
    written(file, served)
    pieces = list(file.pieces())
    assert [adapter for piece in pieces for adapter in piece] == served
    assert max(map(len, pieces)) <= 500
    document = json.loads(file.path.read_text())
    assert (document["format"], len(document["served"])) == (1, 2_000)


def test_a_file_that_was_cut_off_logs_a_warning(file: ServedFile, caplog: pytest.LogCaptureFixture) -> None:
    written(file, SERVED)
    file.path.write_text(file.path.read_text().removesuffix("]}\n"))
    with caplog.at_level(logging.WARNING, "vllm.lora_plugins"):
        assert file.read() == SERVED
    assert "cannot be read" in caplog.text
