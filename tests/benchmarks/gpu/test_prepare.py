"""What travels to a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import prepare


def test_the_carried_folder_has_the_empty_module(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    for name in (
        "vllm/lora/x.py",
        "vllm/_C.abi3.so",
        "vllm/model_executor/models/a.py",
        "vllm-0.33.0.dist-info/METADATA",
    ):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text("")
    into = tmp_path / "gpu"
    (into / "vllm" / "old.py").parent.mkdir(parents=True)
    (into / "vllm" / "old.py").write_text("")
    (into / "sm_90.json").write_text("{}")
    prepare.copy_vllm(sources, into)
    found = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    assert found == {
        "vllm/lora/x.py",
        "vllm/_C_stable_libtorch.py",
        "vllm-0.33.0.dist-info/METADATA",
        "sm_90.json",
    }
    with pytest.raises(SystemExit, match="holds no vllm/lora"):
        prepare.copy_vllm(into / "vllm", tmp_path / "other")
