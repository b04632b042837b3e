"""`explain` prints what the page of errors says of a code, from the package alone."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from lora_plugins.cli import Exit
from lora_plugins.cli.explain import PAGE, plain
from lora_plugins.errors import KINDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "reference" / "errors.md"


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


def test_an_installed_package_has_the_page():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert str(PAGE.relative_to(ROOT / "lora_plugins")) in declared["lora_plugins"]


def test_programs_and_quiet_commands_get_no_explanation(cli):
    for how in ("--json", "--quiet"):
        done = cli("pull", "cut", how)
        assert (done.code, "lora-plugins explain" in done.out + done.err) == (Exit.WRONG, False)
