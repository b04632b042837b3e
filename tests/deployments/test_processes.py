"""API servers, data and pipeline parallelism: what starts answers right, what cannot be right does not start."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, complete_all, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server

NAMES = [spec.name for spec in DEMO_ADAPTERS]

pytestmark = pytest.mark.nightly


def why_it_ends(bed: Bed, home: Path, *arguments: str, plugins: Sequence[str], **env: str) -> str:
    """What a server says that ends instead of serving."""
    home.mkdir(exist_ok=True)
    shutil.copytree(bed.adapters, home / "adapters")
    with pytest.raises(RuntimeError, match="vllm serve ended with 1"), lora_server(
        bed, home, *arguments, plugins=plugins, **env
    ):  # fmt: skip
        pass
    return (home / "server-0.log").read_text()


@pytest.mark.deployment("several API servers, static modules", "tested", "--lora-modules, answered by each server")
def test_several_api_servers_serve_static_modules(bed: Bed, tmp_path: Path) -> None:
    modules = [f"{name}={bed.adapters / name}" for name in NAMES]
    with lora_server(
        bed, tmp_path, "--max-loras", "2", "--api-server-count", "2", "--lora-modules", *modules,
        plugins=(MANAGER, KERNELS), VLLM_ALLOW_RUNTIME_LORA_UPDATING="0",
    ) as server:  # fmt: skip
        asked = NAMES * 8
        answers = asyncio.run(complete_all(server, asked, PROMPT, MAX_TOKENS, at_once=20))
        assert answers == [bed.answers[name] for name in asked]
        log = server.log()
        assert "ApiServer_0" in log
        assert "ApiServer_1" in log
        for _ in range(8):  # a new connection each time, so that both servers are asked
            assert complete(connect(server), "nobody", PROMPT, MAX_TOKENS).status == 404


@pytest.mark.deployment(
    "data parallel, several API servers", "refused", "vLLM starts one for each engine; L007 says `--api-server-count 1`"
)
@pytest.mark.parametrize(
    ("plugins", "updating"),
    [((RESOLVER, MANAGER), "1"), ((RESOLVER, MANAGER, ADMIN), "1"), ((RESOLVER, MANAGER, ADMIN), "0")],
    ids=["resolver", "admin", "admin without updating"],
)
def test_several_api_servers_cannot_change_what_is_served(
    bed: Bed, tmp_path: Path, plugins: Sequence[str], updating: str
) -> None:
    said = why_it_ends(
        bed, tmp_path, "--data-parallel-size", "2", plugins=plugins, VLLM_ALLOW_RUNTIME_LORA_UPDATING=updating
    )
    assert "[L007]" in said
    assert "--api-server-count 1" in said
    assert "Starting to load model" not in said, "it is refused before anything is loaded"
