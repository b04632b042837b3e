"""One real server for all end-to-end tests, over a root with good and broken adapters."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from testbed.bed import Bed, prepare
from testbed.client import connect
from testbed.models import ATTENTION, AdapterSpec, build_adapter, build_base
from testbed.reference import Reference
from testbed.server import Server, vllm_server
from tests.e2e.broken import break_all

MAX_LORA_RANK = 64


@dataclass(frozen=True)
class World:
    """The running server, its adapter root, and what its answers must be."""

    server: Server
    client: openai.OpenAI
    bed: Bed
    root: Path
    reference: Reference

    @property
    def base(self) -> str:
        return str(self.bed.base)


@pytest.fixture(scope="session")
def bed() -> Bed:
    return prepare()


@pytest.fixture(scope="session")
def world(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("world")
    root = home / "adapters"
    shutil.copytree(bed.adapters, root)
    fill(root, bed, home)
    with vllm_server(
        bed.base,
        home / "server.log",
        arguments=(
            "--enable-lora",
            "--max-lora-rank",
            str(MAX_LORA_RANK),
            "--max-loras",
            "4",
            "--max-cpu-loras",
            "32",
            "--lora-modules",
            f"static={bed.adapters / 'sql'}",
        ),
        env={
            "VLLM_PLUGINS": "lora_filesystem_resolver",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(root),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        },
    ) as server:
        yield World(server, connect(server), bed, root, Reference(bed.base))


def fill(root: Path, bed: Bed, home: Path) -> None:
    """Add to the demo's adapters what only tests ask for."""
    good = bed.adapters / "sql"
    break_all(good, root)
    for copy in ("crowd", "vanishing", "sql@v3", "loaded-by-hand", "embedder"):
        shutil.copytree(good, root / copy)
    build_adapter(bed.base, root, AdapterSpec("patterned", 8, ATTENTION, _PATTERNS))
    build_adapter(bed.base, root, AdapterSpec("regex", 8, ATTENTION, {}))
    build_adapter(bed.base, root, AdapterSpec("rank-128", 128))
    other = build_base(home / "other-base", hidden=128, layers=2)
    build_adapter(other, root, AdapterSpec("other-base", 8), base_name="someone/other-7b")
    build_adapter(bed.base, root, AdapterSpec("renamed-base", 8), base_name="someone/same-shapes")
    build_adapter(bed.base, root, AdapterSpec("nameless-base", 8))
    outside = home / "outside"
    shutil.copytree(good, outside / "secret")
    os.symlink(outside / "secret", root / "link-out")
    shutil.copytree(good, root / "link-file-out")
    (root / "link-file-out" / "adapter_model.safetensors").unlink()
    os.symlink(outside / "secret" / "adapter_model.safetensors", root / "link-file-out" / "adapter_model.safetensors")
    os.symlink(root / "team", root / "alias-inside")


_PATTERNS = {
    "rank_pattern": {"q_proj": 16, "layers.1.self_attn.v_proj": 4},
    "alpha_pattern": {"k_proj": 4, "o_proj": 32},
}
