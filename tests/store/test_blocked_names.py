"""Blocked names: with every revision, on disk, for every server of the store, until somebody lifts just that block."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lora_plugins.errors import AdapterNotFound, SourceUnavailable
from lora_plugins.store.blocked_names import Blocks
from lora_plugins.store.layout import Layout
from tests.other_processes import other_processes

DIGEST = "1f2e3d4c" * 8


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "store")
    made.create()
    return made


def blocked(layout: Layout, *names: str) -> Blocks:
    blocks = Blocks(layout)
    for name in names:
        blocks.hold(name)
        blocks.write(name)
    return blocks


@pytest.mark.parametrize("name", ["team/sql", "team/sql@main", f"team/sql@{DIGEST}", f"team/sql@{DIGEST[:8]}"])
def test_a_block_is_of_every_revision_and_digest(layout: Layout, name: str) -> None:
    assert name in blocked(layout, "team/sql")


@pytest.mark.parametrize("name", ["team", "team/sql2", "sql", "team/sql/x", "", "\ud800", "@", "x" * 5000, "../sql"])
def test_other_names_are_not_blocked(layout: Layout, name: str) -> None:
    assert name not in blocked(layout, "team/sql")


def test_a_block_of_a_revision_is_of_it_alone(layout: Layout) -> None:
    blocks = blocked(layout, "sql@v1")
    assert ["sql@v1" in blocks, "sql@v2" in blocks, "sql" in blocks] == [True, False, False]


def test_a_load_of_the_name_passes_its_own_block_only(layout: Layout) -> None:
    blocked(layout, "sql@v1").refuse("sql@v1", but_itself=True)
    blocks = blocked(layout, "sql")
    blocks.refuse("sql", but_itself=True)
    with pytest.raises(AdapterNotFound, match="load 'sql' again"):
        blocks.refuse("sql@v1", but_itself=True)


def test_another_process_of_the_store_sees_it(layout: Layout) -> None:
    blocked(layout, "sql", "chat")
    with other_processes() as process:
        assert process.submit(seen, layout.root).result(60) == (["chat", "sql"], True, False)


def seen(root: Path) -> tuple[list[str], bool, bool]:
    blocks = Blocks(Layout(root))
    return sorted(blocks.names()), "sql@main" in blocks, "other" in blocks


def test_a_running_server_sees_it_at_once(layout: Layout) -> None:
    other = Blocks(layout)
    assert "sql" not in other
    mine = blocked(layout, "sql")
    assert "sql" in other
    assert other.lift("sql", other.present("sql"))
    assert "sql" not in mine
    assert mine.names() == set()


def test_it_holds_in_this_process_before_it_is_written(layout: Layout) -> None:
    blocks = Blocks(layout)
    blocks.hold("sql")
    assert ("sql@main" in blocks, blocks.names()) == (True, {"sql"})


@pytest.mark.parametrize("is_written", [True, False])
def test_one_made_during_a_load_is_not_lifted(layout: Layout, is_written: bool) -> None:
    loading = blocked(layout, "sql")
    seen = loading.present("sql")
    if is_written:
        blocked(layout, "sql")
    else:
        loading.hold("sql")
    assert not loading.lift("sql", seen)
    assert "sql" in loading
    assert "sql" in Blocks(layout)


def test_what_cannot_be_written_holds_here(layout: Layout) -> None:
    blocks = Blocks(layout)
    layout.root.rename(layout.root.with_name("away"))
    blocks.hold("sql")
    with pytest.raises(OSError, match="No such file"):
        blocks.write("sql")
    assert "sql" in blocks
    assert not layout.root.exists()


def test_one_of_another_server_holds_while_the_store_is_away(layout: Layout) -> None:
    blocked(layout, "sql", "chat")
    blocks = Blocks(layout)
    assert ("sql" in blocks, blocks.names()) == (True, {"sql", "chat"})
    assert blocks.lift("chat", blocks.present("chat"))
    layout.root.rename(layout.root.with_name("away"))
    assert ("sql" in blocks, "chat" in blocks, "other" in blocks) == (True, False, False)


@pytest.mark.parametrize("answer", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTDIR])
def test_a_store_that_cannot_be_asked_refuses(layout: Layout, answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, stat, read = blocked(layout, "sql"), os.stat, Path.read_text

    def fails(path: object) -> None:
        if str(path).startswith(str(layout.folder("blocked"))):
            raise OSError(answer, os.strerror(answer), str(path))

    def failing_stat(path: object, **more: object) -> os.stat_result:
        fails(path)
        return stat(path, **more)  # type: ignore[call-overload,no-any-return]

    def failing_read(path: Path, *given: object, **more: object) -> str:
        fails(path)
        return read(path, *given, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as broken:
        broken.setattr(os, "stat", failing_stat)
        broken.setattr(Path, "read_text", failing_read)
        for name in ("sql", "sql@main", "other"):
            with pytest.raises(SourceUnavailable, match=r"LORA_PLUGINS_STORE_DIR") as refused:
                blocks.refuse(name)
            assert os.strerror(answer) in refused.value.found
        with pytest.raises(SourceUnavailable):
            blocks.refuse("other@v1", but_itself=True)
        with pytest.raises(SourceUnavailable):
            blocks.present("sql")  # else a load would serve the name
        assert "other" not in blocks, "nothing is unloaded for it"
    blocks.refuse("other")
    with pytest.raises(AdapterNotFound):
        blocks.refuse("sql")


def test_a_file_cut_short_blocks_its_name_still(layout: Layout) -> None:
    blocks = blocked(layout, "sql")
    (file,) = os.scandir(layout.folder("blocked"))
    Path(file.path).write_text("")
    assert ("sql" in blocks, blocks.names()) == (True, set())
    assert blocks.lift("sql", blocks.present("sql"))
    assert "sql" not in blocks


def test_each_block_is_read_once(layout: Layout) -> None:
    """The event loop lists the names for requests, and there may be thousands."""
    blocks = blocked(layout, "a", "b")
    assert blocks.names() == {"a", "b"}
    for file in layout.folder("blocked").iterdir():
        file.write_text("{")  # a second look would find no name
    assert blocks.names() == {"a", "b"}
    other = blocked(layout, "c")
    assert other.lift("a", other.present("a"))
    assert (blocks.names(), blocks.among(["a", "b@v1", "c"])) == ({"b", "c"}, {"b@v1", "c"})
