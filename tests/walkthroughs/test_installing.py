"""The page on installing, beside this machine's vLLM: pip takes this tree by a git address, the rest from an index."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.walkthroughs.reader import ROOT, Reader, Step, Walk, index_variables

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("git") is None, reason="pip takes this tree from a git address"),
]

ADDED = {"lora-plugins", "aiofiles", "stamina", "s3fs"}
PLAIN = 'pip install "lora-plugins @ git+$REPOSITORY"    # or: uv pip install …'
WITH_S3 = "pip list --format=freeze --exclude lora-plugins > installed.txt"
INSTALL = Walk(
    "docs/get-started/install.md",
    [Step(PLAIN), Step(WITH_S3)],
    {
        "pip check": (
            '[ "$(pip check)" = "$BROKEN_BEFORE" ]',
            "requirements/engine-cpu.txt leaves out what vLLM needs for pictures and sound, so pip finds it broken",
        )
    },
)
NOT_LINKED = (*ADDED, "lora_plugins", "__editable__", "__pycache__", "pip", "setuptools", "_distutils", "distutils")


def published(folder: Path) -> str:
    """The address of a git repository of the package as it is in this tree."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "lora_plugins", folder / "lora_plugins", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(folder), "-c", "user.name=tests", "-c", "user.email=tests@example.invalid"]
    allowed = ["config", "uploadpack.allowFilter", "true"]  # as servers of git repositories have it: pip asks for it
    for command in (["init", "-q"], allowed, ["add", "."], ["commit", "-qm", "Publish the package"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    return f"file://localhost{folder}"  # pip takes no address without a host


@dataclass(frozen=True)
class Environment:
    """A virtual environment with vLLM and all that vLLM brings, which are links to those of this machine."""

    folder: Path

    def make(self, seen_as: Path | None = None) -> None:
        """Make the folder, which is `seen_as` another path by its own processes if the path is given."""
        venv.create(self.folder, with_pip=True)
        linked = self.folder / "linked"
        linked.mkdir()
        found = importlib.util.find_spec("typer")
        assert found is not None
        assert found.origin is not None
        for path in Path(found.origin).parent.parent.iterdir():
            if not path.name.startswith(NOT_LINKED) and path.suffix != ".pth":
                (linked / path.name).symlink_to(path)
        (self.own / "linked.pth").write_text(f"{(seen_as or self.folder) / linked.name}\n")

    @property
    def own(self) -> Path:
        (site,) = self.folder.glob("lib/python*/site-packages")
        return site

    def env(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**index_variables(), "PATH": path, "PYTHONPATH": "", "HOME": str(self.folder), "PIP_NO_CACHE_DIR": "1"}

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.folder / "bin" / "pip"), *arguments]
        return subprocess.run(command, env=self.env(), capture_output=True, text=True, check=False, timeout=300)

    def installed(self) -> dict[str, str]:
        found = importlib.metadata.distributions(path=[str(self.own), str(self.folder / "linked")])
        return {each.name.lower(): each.version for each in found}


def test_installing_beside_a_real_vllm_replaces_nothing(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env")
    environment.make()
    if environment.pip("download", "--no-deps", "-d", str(tmp_path / "tried"), "stamina").returncode:
        pytest.skip("no index of packages can be reached here")
    before = environment.installed()
    assert "vllm" in before
    own = {"REPOSITORY": published(tmp_path / "published"), "BROKEN_BEFORE": environment.pip("check").stdout.strip()}
    reader = Reader(INSTALL, tmp_path, environment.env() | own, {}, "")
    reader.read()
    after = environment.installed()
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == ADDED
    assert f"vllm        ok   vLLM {before['vllm']}" in reader.printed[PLAIN]
    assert "0 problems" in reader.printed[PLAIN]
