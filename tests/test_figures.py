"""The counts of `tools/figures.py`, on texts whose counts are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import figures


def test_pointing_words_are_counted_as_words() -> None:
    assert figures.pointing("It says what those of them are, and its oneness is suchlike.") == 4  # It what those them
    assert figures.pointing("`it`, that\nThis") == 2  # code points at nothing
    assert figures.pointing_in_hundred("`a` that `b` stands `c` alone, right") == 25


def test_docstrings_and_comments_are_prose_and_strings_are_not(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""One."""\nX = "that"  # this counts\n"""What."""\nY = 1  # noqa: F401\n\n\n# such\n')
    assert figures.prose([module]).split() == ["One.", "What.", "this", "counts", "such"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Two words. Three words here.\n", [2, 3]),
        ("# A heading\n\nOne\nsentence.\n\n- an item\n- another `long code` item\n", [2, 2, 3]),
        ("```\nno words. At all\n```\nFour words stand here.\n", [4]),
        (
            "| a | b |\n|---|---|\n| `x` | a cell with six whole words |\n",
            [6],
        ),  # cells of a word or two are no sentences
        ("[A link](page.md#anchor) is text, e.g. vLLM 0.32 too.\n", [8]),
    ],
)
def test_sentences_of_a_page(text: str, words: list[int]) -> None:
    assert [len(figures.words(sentence)) for sentence in figures.sentences(text)] == words


def test_changed_files_are_those_since_a_commit(tmp_path: Path) -> None:
    package = tmp_path / figures.PACKAGE
    package.mkdir()
    (package / "old.py").write_text("")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x"]):
        figures.git(tmp_path, *command)
    (package / "new.py").write_text("")
    (package / "old.py").write_text("# changed")
    assert [path.name for path in figures.changed(tmp_path, "HEAD")] == ["new.py", "old.py"]


def test_a_private_twin_shares_its_class_name(tmp_path: Path) -> None:
    paths = [tmp_path / "one.py", tmp_path / "other.py"]
    for path, name in zip(paths, ("Plan", "_Plan"), strict=True):
        path.write_text(f"class {name}: ...\nclass {path.stem.title()}: ...\n")
    assert figures.shared_class_names(paths) == ["Plan"]
