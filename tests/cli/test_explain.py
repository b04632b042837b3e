"""`explain` prints what the page of errors says of a code, from the package alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_plugins.cli import Exit
from lora_plugins.cli.explain import PAGE, plain
from lora_plugins.errors import KINDS

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


def test_the_packages_page_is_that_of_the_docs():
    assert PAGE.read_text() == plain(DOCS.read_text()), "run tools/write_cli_doc.py"


@pytest.mark.parametrize("kind", KINDS)
def test_each_code_has_a_meaning_and_a_remedy(cli, kind):
    done = cli("explain", kind.code, "--json")
    assert (done.code, done.json["kind"]) == (Exit.OK, kind.__name__)
    assert len(done.json["when"]) > 20
    assert len(done.json["remedy"]) > 40
    text = cli("explain", kind.code.lower()).out
    assert text.startswith(f"{kind.code} {kind.__name__}")
    assert "](" not in text + done.json["remedy"], "a link that nobody can follow in a terminal"


def test_an_unknown_code_is_a_matter_of_usage(cli):
    done = cli("explain", "L999")
    assert (done.code, "L001" in done.err) == (Exit.USAGE, True)


def test_an_installed_package_has_the_page(tmp_path):
    source = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tree / name).write_bytes((source / name).read_bytes())
    subprocess.run(["cp", "-r", source / "lora_plugins", tree], check=True)
    subprocess.run([*command, tree], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    code = "from lora_plugins.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "explain", "L003"],
        env={**os.environ, "PYTHONPATH": str(unpacked(wheel, tmp_path / "site"))},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout[:4]) == (0, "L003"), done.stderr


def test_programs_and_quiet_commands_get_no_explanation(cli):
    for how in ("--json", "--quiet"):
        done = cli("pull", "cut", how)
        assert (done.code, "lora-plugins explain" in done.out + done.err) == (Exit.WRONG, False)


def unpacked(wheel: Path, folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, folder], check=True)
    return folder
