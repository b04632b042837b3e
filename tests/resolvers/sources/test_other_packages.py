"""Sources of other packages: the guide's example keeps to the public contract, and is served where it is installed."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from lora_plugins.cli.lookup import sources_of_environment
from lora_plugins.errors import InvalidSettings
from lora_plugins.plugin_names import OTHERS
from lora_plugins.resolvers.sources import configured
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.settings import Settings
from lora_plugins.testing import SourceContract, SourceHarness

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "archives.py"


def example() -> ModuleType:
    module = ModuleType("archives")
    exec(compile(EXAMPLE.read_text(), EXAMPLE, "exec"), vars(module))
    return module


class ZipHarness(SourceHarness):
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def make_source(self) -> Source:
        return example().source({"LORA_ARCHIVES": str(self.root)})

    def put_adapter(self, name: str, files: Mapping[str, bytes]) -> None:
        path = self.root / f"{name}.zip"
        path.parent.mkdir(parents=True, exist_ok=True)
        before = {}
        if path.is_file():
            with zipfile.ZipFile(path) as archive:
                before = {entry: archive.read(entry) for entry in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for entry, data in {**before, **files}.items():
                archive.writestr(entry, data)

    def break_source(self) -> None:
        self.root.rename(self.root.with_name("away"))

    def restore_source(self) -> None:
        self.root.with_name("away").rename(self.root)


class TestGuidesExample(SourceContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> ZipHarness:
        return ZipHarness(tmp_path / "archives")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Install entry points: each name with what its function is."""

    def install(**functions: object) -> None:
        class Point(EntryPoint):
            def load(self) -> object:
                return functions[self.name]

        points = [Point(name, f"package:{name}", configured.ENTRY_POINTS) for name in functions]
        monkeypatch.setattr(configured, "entry_points", lambda group: [it for it in points if it.group == group])
        monkeypatch.setenv("VLLM_PLUGINS", OTHERS)

    return install


def test_sources_of_installed_packages_are_asked_by_name(installed, monkeypatch, tmp_path):
    source = example().source
    installed(beta=lambda env: source({"LORA_ARCHIVES": str(tmp_path)}), alpha=source)
    assert [str(found) for found in sources_of_environment(Settings())] == [f"archives ({tmp_path})"]
    monkeypatch.setenv("LORA_ARCHIVES", "/alpha")
    assert [str(found) for found in sources_of_environment(Settings())] == [
        "archives (/alpha)",
        f"archives ({tmp_path})",
    ]
    monkeypatch.setenv("VLLM_PLUGINS", "lora_lru_manager")
    assert sources_of_environment(Settings()) == []


def test_a_source_that_cannot_be_made_stops_startup(installed):
    installed(broken=lambda env: env["MISSING"])
    with pytest.raises(InvalidSettings, match=r"the source 'broken' \(package:broken\).*KeyError.*MISSING"):
        configured.sources_of(OTHERS, Settings())
