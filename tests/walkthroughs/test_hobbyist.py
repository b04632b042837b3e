"""A hobbyist: an adapter of the Hub with the README's lines, and adapters on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lora_plugins.kernels.compiled import build
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.hub import local_hub
from testbed.models import PROMPT
from testbed.server import reserved_port
from tests.walkthroughs.conftest import SMALL
from tests.walkthroughs.reader import Do, Step, Walk, left_out, reading

pytestmark = pytest.mark.nightly

HUB_ADAPTER = "jeeejeee/llama32-3b-text2sql-spider"
CURL = "curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\"
PORT = ("127.0.0.1:{port}", "other servers run beside this one")

README = Walk(
    "README.md",
    [
        Step("pip install .    # in a checkout, beside the vLLM that is there; replaces nothing", Do.SERVE),
        Step(CURL),
        left_out(
            "make demo    # a real vllm serve is asked for names it has never heard of, and answers as PEFT does",
            "for whoever works on this project; make demo is a check of its own",
            "17f94c9b",
        ),
    ],
    {
        "pip install . ": ("true ", "no network; tests/installation/ installs the wheel beside a vLLM"),
        "vllm serve meta-llama/Llama-3.2-3B-Instruct": (
            f"vllm serve {{base}} --host 127.0.0.1 --port {{port}} {SMALL}",
            "two cores and no network: a tiny Llama",
        ),
        "localhost:8000": PORT,
    },
)

CPU = Walk(
    "docs/get-started/cpu.md",
    [
        left_out("make set-up", "has made what runs this test"),
        Step('eval "$(.venv/bin/python -m testbed)"    # sets BASE and ADAPTERS'),
        Step(
            "export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_LORA_RESOLVER_CACHE_DIR=$ADAPTERS VLLM_CPU_KVCACHE_SPACE=1",
            Do.SERVE,
        ),
        Step(CURL),
    ],
    {
        ".venv/bin/vllm serve $BASE": (
            "vllm serve $BASE --host 127.0.0.1 --port {port}",
            "other servers run beside this one",
        ),
        "localhost:8000": PORT,
    },
)


@pytest.mark.timeout(1200)
def test_the_readme_serves_an_adapter_of_the_hub(tmp_path: Path, bed: Bed, spawned: dict[str, str]) -> None:
    with local_hub() as hub, reserved_port() as port:
        hub.commit(HUB_ADAPTER, {file.name: file.read_bytes() for file in (bed.adapters / "chat").iterdir()})
        env = spawned | hub.env(tmp_path / "hub")
        values = {"base": str(bed.base), "port": str(port)}
        with reading(README, tmp_path, env=env, values=values, url=f"http://127.0.0.1:{port}") as reader:
            answer = json.loads(reader.printed[CURL])
            assert (answer["model"], answer["object"]) == (HUB_ADAPTER, "text_completion")
            asked = complete(connect(reader.servers[0]), HUB_ADAPTER, PROMPT, MAX_TOKENS)
            assert (asked.error, list(asked.token_ids)) == ("", bed.answers["chat"])


@pytest.mark.timeout(1200)
def test_the_page_on_cpus_serves_its_own_adapters(tmp_path: Path, bed: Bed, spawned: dict[str, str]) -> None:
    """By vLLM's own command, whose worker is spawned: the worker says in the log which kernels compute."""
    (tmp_path / ".venv").symlink_to(sys.prefix)  # of the checkout
    with (
        reserved_port() as port,
        reading(CPU, tmp_path, env=spawned, values={"port": str(port)}, url=f"http://127.0.0.1:{port}") as reader,
    ):
        assert reader.printed[CPU.steps[1].first].split() == sorted(path.name for path in bed.adapters.iterdir())
        answer = json.loads(reader.printed[CURL])
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("sql", 8)
        asked = complete(connect(reader.servers[0]), "sql", PROMPT, MAX_TOKENS)
        assert (asked.error, list(asked.token_ids)) == ("", bed.answers["sql"])
        log = reader.servers[0].log()
        if build.problem():
            assert f"LoRA kernels: vllm (the platform is cpu, and {build.problem()})" in log
        else:
            assert "LoRA kernels: cpu (the platform is cpu)" in log
            assert "Using CompiledPunicaWrapperCPU" in log
