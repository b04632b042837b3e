"""`inspect` and `why` say "would be served" only of what was compared with the modules of a base model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_plugins.cli import Exit, worst
from lora_plugins.store.model_file import ModelFile
from tests.cli.common import Cli
from tests.cli.test_golden import MODULES
from tests.make import adapter_files, put


@pytest.fixture
def base(cli: Cli) -> Path:
    """A model directory of the name that the adapter names, of which no engine has listed the modules."""
    made = cli.root / "tiny"
    made.mkdir()
    cli.store.mkdir()
    return made


@pytest.mark.parametrize("command", ["inspect", "why"])
def test_without_known_modules_nothing_fits(cli, base, command):
    asked = str(cli.adapters / "sql") if command == "inspect" else "sql"
    for options in ([], ["--base-model", base], ["--base-model", base, "--max-lora-rank", "16"]):
        done = cli(command, asked, *options)
        assert done.code == Exit.NOT_COMPARED
        assert "would be served" not in done.out
        assert "fits" not in done.out
        assert "not compared" in done.out.splitlines()[-1]
        assert cli(command, asked, *options, "--json").only["verdict"] == "not compared"
    assert "--base-model" in cli(command, asked).out.splitlines()[-1]
    assert "no engine has listed the modules" in cli(command, asked, "--base-model", base).out.splitlines()[-1]


@pytest.mark.parametrize("command", ["inspect", "why"])
def test_a_rank_that_nobody_compared_is_named(cli, base, command):
    ModelFile(cli.store, str(base)).write(MODULES)
    asked = str(cli.adapters / "sql") if command == "inspect" else "sql"
    done = cli(command, asked, "--base-model", base)
    assert (done.code, "would be served, with --max-lora-rank 8 or more" in done.out) == (Exit.OK, True)
    done = cli(command, asked, "--base-model", base, "--max-lora-rank", "16")
    assert done.code == Exit.OK
    assert done.out.splitlines()[-1].endswith("would be served")


@pytest.mark.parametrize("command", ["inspect", "why"])
def test_a_pickle_is_not_compared_with_anything(cli, base, command):
    ModelFile(cli.store, str(base)).write(MODULES)
    files = adapter_files()
    files["adapter_model.bin"] = files.pop("adapter_model.safetensors")
    folder = put(cli.adapters / "old", files)
    cli.env["LORA_PLUGINS_ALLOW_PICKLE"] = "1"
    done = cli(command, folder if command == "inspect" else "old", "--base-model", base)
    assert (done.code, "not compared: its weights are a pickle" in done.out) == (Exit.NOT_COMPARED, True)


def test_what_is_refused_is_worse_than_what_is_not_compared(cli):
    assert worst([Exit.OK, Exit.NOT_COMPARED]) is Exit.NOT_COMPARED
    assert worst([Exit.NOT_COMPARED, Exit.WRONG, Exit.OK]) is Exit.WRONG
    done = cli("inspect", cli.adapters / "sql", cli.adapters / "cut")
    assert done.code == Exit.WRONG
