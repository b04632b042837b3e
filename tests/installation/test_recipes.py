"""The blocks of the pages on installing and upgrading, run as written beside packages that must stay as they are."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from testbed.pages import blocks
from tests.installation.stub_wheels import Environment, stub_wheel

ROOT = Path(__file__).parents[2]
RECIPE = "pip list --format=freeze --exclude lora-plugins > installed.txt"
SOURCE = "git+$REPOSITORY"  # what a reader without a repository of ours takes from a wheel here
NEWER = "2.0"


def recipes(page: str) -> list[str]:
    return [block.text for block in blocks((ROOT / page).read_text()) if block.first == RECIPE]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """lora-plugins 1.0 and an older fsspec than the index has, as after a first installation."""
    made = Environment(tmp_path / "env", tmp_path / "index")
    venv.create(made.folder, with_pip=True)  # the blocks run the environment's own pip
    made.have("lora-plugins", "1.0", ("fsspec",))
    made.have("fsspec", "1.0")
    made.offer("fsspec", NEWER)
    made.offer("s3fs", "1.0", ("fsspec==1.0",))
    made.offer("s3fs", NEWER, ("fsspec==2.0",))
    return made


def run(environment: Environment, folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    wheels = folder / "wheels"
    wheels.mkdir()
    wheel = stub_wheel(wheels, "lora-plugins", NEWER, ("fsspec", 's3fs; extra == "s3"'))
    assert SOURCE in script
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.replace(SOURCE, wheel.as_uri())],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
        env={
            "PATH": f"{environment.folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder),
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(environment.index), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
    )  # fmt: skip


@pytest.mark.parametrize(("page", "s3fs"), [("docs/get-started/install.md", "1.0"), ("docs/operate/upgrade.md", None)])
def test_recipe_upgrades_us_and_changes_nothing_else(tmp_path, environment, page, s3fs):
    (script,) = recipes(page)
    before = environment.installed()
    done = run(environment, tmp_path, script)
    assert done.returncode == 0, done.stderr
    added = {} if s3fs is None else {"s3fs": s3fs}
    assert environment.installed() == before | {"lora-plugins": NEWER} | added
