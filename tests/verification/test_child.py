"""What runs in the other process: the verification of this one, and little else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lora_plugins.adapter.config import CONFIG_FILE, parse_config
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter
from lora_plugins.settings import Settings
from lora_plugins.verification.children import Children
from tests.make import adapter_files, put, sharded
from tests.verification.conftest import NAMED, program, read, written


def test_it_reads_what_verification_in_this_process_reads(kept_children: Children, adapter: Path) -> None:
    found = read(kept_children, adapter)
    here = verify_adapter(adapter, None, Settings())
    assert found.adapter == replace(here, config=replace(here.config, targets=None))
    assert parse_config(found.canonical) == here.config


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"use_qalora": True}, IncompatibleAdapter),
        ({"r": "4"}, InvalidAdapter),
        (None, AdapterNotFound),
    ],
)
def test_its_errors_are_those_of_verification(
    kept_children: Children, tmp_path: Path, change: dict[str, object] | None, kind: type[Exception]
) -> None:
    directory = put(tmp_path / "sql", adapter_files(**(change or {})))
    if change is None:
        (directory / CONFIG_FILE).unlink()
    with pytest.raises(kind) as here:
        verify_adapter(directory, None, Settings())
    with pytest.raises(kind) as there:
        read(kept_children, directory)
    assert there.value.plain() == here.value.plain()


def test_neither_torch_nor_vllm_nor_variables_are_there(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_PLUGINS_ADMIN_KEY", "the-secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    assert read(children, adapter)
    (pid,) = children.pids()
    assert "the-secret" not in str(psutil.Process(pid).environ())
    maps = {mapped.path for mapped in psutil.Process(pid).memory_maps()}
    assert not [path for path in maps if "/torch/" in path or "/vllm/" in path]


@pytest.mark.parametrize("files", [sharded(adapter_files()), NAMED], ids=["several files", "a name in keys"])
def test_it_converts_as_this_process_does(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> None:
    program(monkeypatch, "from lora_plugins.verification import child; child._LANDED_BYTES = 1")
    there, here = written(children, put(tmp_path / "sql", files), tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    assert there == here
    assert here[-1] == (tmp_path / "here").stat().st_size
