"""What the engines of all walkthroughs are given: what a machine with two cores and no network needs."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from testbed import forked_command
from testbed.bed import Bed, prepare
from testbed.forking_vllm import RUN
from testbed.server import SMALL_ENGINE
from tests.e2e.servers import BLOCKS, ENVIRONMENT
from tests.walkthroughs.reader import ROOT

SMALL = shlex.join((*SMALL_ENGINE, *BLOCKS))


@pytest.fixture(scope="session")
def bed() -> Bed:
    return prepare()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Of a reader who has installed all, in a home of their own. `vllm` is forked, but where `spawned` is asked for."""
    (tmp_path / "home").mkdir()
    forked_command.install(tmp_path / "forked")
    return {
        "PATH": f"{tmp_path / 'forked'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        **({RUN: os.environ[RUN]} if RUN in os.environ else {}),
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path / "home"),
        # Where vLLM keeps what it finds out about a model's class, in a process that takes twelve seconds of a core.
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm")),
        "LORA_PLUGINS_STORE_DIR": str(tmp_path / "store"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **ENVIRONMENT,
    }


@pytest.fixture
def spawned(env: dict[str, str]) -> dict[str, str]:
    """The same, with the command that vLLM's installation brings."""
    return {**env, "PATH": env["PATH"].partition(":")[2]}
