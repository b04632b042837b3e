"""The blocks of the pages on installing and upgrading, run as written beside packages that must stay as they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from testbed.pages import blocks
from tests.installation.stub_wheels import Environment, stub_wheel

ROOT = Path(__file__).parents[2]
RECIPE = "pip list --format=freeze --exclude lora-plugins > installed.txt"
NEWER = "2.0"
VERSION = "1.0"  # of every commit, as between two releases
BACKEND = 'import shutil\n\ndef build_wheel(folder, *_):\n    shutil.copy("{0}", folder)\n    return "{0}"\n'
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="pip takes each version from a git address")


def recipe(page: str, first: str = RECIPE) -> str:
    (script,) = [block.text for block in blocks((ROOT / page).read_text()) if block.first.startswith(first)]
    return script


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """lora-plugins 1.0 and an older fsspec than the index has, as after a first installation."""
    made = Environment(tmp_path / "env", tmp_path / "index")
    made.have_pip()
    made.have("lora-plugins", VERSION, ("fsspec",))
    made.have("fsspec", "1.0")
    made.offer("fsspec", NEWER)
    made.offer("stamina", NEWER)
    made.offer("s3fs", "1.0", ("fsspec==1.0",))
    made.offer("s3fs", NEWER, ("fsspec==2.0",))
    return made


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=tests", "-c", "user.email=tests@example.invalid", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def commits(tmp_path: Path) -> list[str]:
    """Two commits of a repository with one version number; the second needs one package more."""
    folder = tmp_path / "repository"
    git(tmp_path, "init", "-q", str(folder))
    git(folder, "config", "uploadpack.allowFilter", "true")  # as servers of git repositories have it: pip asks for it
    made = []
    for needs in (("fsspec",), ("fsspec", "stamina")):
        wheel = stub_wheel(folder, "lora-plugins", VERSION, (*needs, 's3fs; extra == "s3"'))
        (folder / "backend.py").write_text(BACKEND.format(wheel.name))
        (folder / "pyproject.toml").write_text(PROJECT)
        git(folder, "add", ".")
        git(folder, "commit", "-qm", "Change what is needed")
        made.append(git(folder, "rev-parse", "HEAD"))
    return made


def run(environment: Environment, folder: Path, script: str, at: str = "") -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
        env={
            "PATH": f"{environment.folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder),
            "REPOSITORY": f"file://localhost{folder / 'repository'}{at}",  # pip takes no address without a host
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(environment.index), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_recipe_for_s3_changes_no_other_package(tmp_path, environment, commits):
    before = environment.installed()
    run(environment, tmp_path, recipe("docs/get-started/install.md"))
    assert environment.installed() == before | {"s3fs": "1.0", "stamina": NEWER}


def test_recipe_upgrades_and_goes_back_at_one_version_number(tmp_path, environment, commits):
    """Back is the same block, with the commit behind the address, as the page says."""
    before, script = environment.installed(), recipe("docs/operate/upgrade.md")
    older, newer = commits
    for at, expected in (("", newer), (f"@{older}", older)):
        run(environment, tmp_path, script, at)
        (file,) = environment.folder.glob("lib/python*/site-packages/lora_plugins-*.dist-info/direct_url.json")
        assert json.loads(file.read_text())["vcs_info"]["commit_id"] == expected
        assert environment.installed() == before | {"stamina": NEWER}


def test_carried_wheels_install_without_an_index(tmp_path, environment, commits):
    before, page = environment.installed(), "docs/get-started/air-gapped.md"
    run(environment, tmp_path, recipe(page, "pip wheel"))
    run(environment, tmp_path, "pip uninstall -y lora-plugins")
    shutil.rmtree(environment.index)
    run(environment, tmp_path, recipe(page, "pip install"))
    assert environment.installed() == before | {"stamina": NEWER}
