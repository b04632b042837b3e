"""What the engines of all walkthroughs are given: what a machine with two cores and no network needs."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from testbed.bed import Bed, prepare
from testbed.server import SMALL_ENGINE
from tests.e2e.servers import ENVIRONMENT
from tests.walkthroughs.reader import ROOT

SMALL = shlex.join(SMALL_ENGINE)


@pytest.fixture(scope="session")
def bed() -> Bed:
    return prepare()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Of a reader who has installed all, in a home of their own."""
    (tmp_path / "home").mkdir()
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path / "home"),
        "LORA_PLUGINS_STORE_DIR": str(tmp_path / "store"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **ENVIRONMENT,
    }
