"""What a release is made of: notes, version, and the environment in which its files are tried."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tools import clean_engine, prepare_release, release_notes
from tools.index_page import UNTIL

CHANGELOG = """# Changelog

## [Unreleased]

### Added
- New [thing](docs/thing.md).

## [0.1.0] - 2026-11-22

### Added
- Old thing.
"""


def test_notes_are_the_section_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPOSITORY", "https://git.example.com/us")
    assert release_notes.notes("v0.1.0", CHANGELOG, "0.1.0") == "### Added\n- Old thing."
    early = release_notes.notes("v0.2.0rc1", CHANGELOG, "0.2.0rc1")
    assert early == "### Added\n- New [thing](https://git.example.com/us/blob/v0.2.0rc1/docs/thing.md)."


@pytest.mark.parametrize(
    ("tag", "version", "said"),
    [("v0.2.0", "0.1.0", "has to be v0.1.0"), ("v0.2.0", "0.2.0", "no section"), ("vx", "x", "no version")],
)
def test_a_tag_of_another_tree_is_refused(tag: str, version: str, said: str) -> None:
    with pytest.raises(release_notes.NotReady, match=said):
        release_notes.notes(tag, CHANGELOG, version)


def test_notes_longer_than_a_host_takes_are_cut() -> None:
    long = CHANGELOG.replace("- Old thing.", "- Old thing.\n" * 20_000)
    text = release_notes.notes("v0.1.0", long, "0.1.0")
    assert len(text) < 125_000
    assert text.endswith("- Old thing.\n\nThe rest is in CHANGELOG.md.")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "lora_plugins/__init__.py": '"""Doc."""\n\n__version__ = "0.1.0"\n',
        "CHANGELOG.md": CHANGELOG,
        "README.md": f"Before {UNTIL}\n\nAlways\n",
        "docs/page.md": f"Always\nBefore {UNTIL}\n",
        "docs/other.md": "Always\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_release_has_one_version_everywhere(tree: Path) -> None:
    changed = prepare_release.prepare(tree, "0.2.0", "2026-12-01")
    assert changed == ["lora_plugins/__init__.py", "CHANGELOG.md", "README.md", "docs/page.md"]
    assert '__version__ = "0.2.0"\n' in (tree / "lora_plugins" / "__init__.py").read_text()
    text = (tree / "CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n- New" in text
    assert release_notes.notes("v0.2.0", text, "0.2.0").startswith("### Added\n- New")
    assert (tree / "README.md").read_text() == "\nAlways\n"
    assert (tree / "docs" / "page.md").read_text() == "Always\n"
    with pytest.raises(ValueError, match="already"):
        prepare_release.prepare(tree, "0.2.0", "2026-12-02")


def test_a_pre_release_changes_the_version_alone(tree: Path) -> None:
    assert prepare_release.prepare(tree, "0.2.0rc1", "2026-12-01") == ["lora_plugins/__init__.py"]
    with pytest.raises(ValueError, match="no version"):
        prepare_release.prepare(tree, "next", "2026-12-01")


def test_a_clean_environment_has_vllms_requirements_alone() -> None:
    found = clean_engine.closure(Path(sysconfig.get_path("purelib")))
    assert {"vllm", "torch", "fastapi", "transformers"} <= found.keys()
    assert not {"lora-plugins", "stamina", "pytest", "boto3"} & found.keys()


def test_a_file_written_in_place_has_another_digest(tmp_path: Path) -> None:
    engine = clean_engine.CleanEngine(tmp_path)
    (tmp_path / "file").write_text("before")
    (tmp_path / "link").hardlink_to(tmp_path / "file")
    before = engine.digests()
    assert before["file"] == before["link"]
    (tmp_path / "file").write_text("behind")
    after = engine.digests()
    assert after["file"] == after["link"] != before["file"]
    (tmp_path / "link").unlink()
    assert engine.digests().keys() == {"file"}


def test_an_environment_without_vllm_is_no_place_to_try(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="found nothing"):
        clean_engine.closure(tmp_path)
