"""API servers, data and pipeline parallelism: what starts answers right, what cannot be right does not start."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, complete_all, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from tests.deployments.quiet import metric
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server
from tests.e2e.standing_still import LONGEST_S

NAMES = [spec.name for spec in DEMO_ADAPTERS]

# Answers every request on the socket that vLLM hands to its front end.
FRONT_END = """
import socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"stand-in")

server = HTTPServer(("127.0.0.1", 0), Answer, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[sys.argv.index("--listen-fd") + 1]))
server.server_activate()
server.serve_forever()
"""

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
    (tmp_path / "metrics").mkdir()
    with lora_server(
        bed, tmp_path, "--max-loras", "2", "--max-cpu-loras", str(len(NAMES)), "--api-server-count", "2",
        "--lora-modules", *modules,
        plugins=(MANAGER, KERNELS), VLLM_ALLOW_RUNTIME_LORA_UPDATING="0",
        # vLLM makes one before it spawns its API servers; a forked one has imported prometheus_client before.
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "metrics"),
    ) as server:  # fmt: skip
        ends_at = time.monotonic() + LONGEST_S
        while server.log().count("Application startup complete") < 2:  # the port answers as soon as one has started
            assert time.monotonic() < ends_at, server.log()[-4000:]
            time.sleep(0.2)
        asked = NAMES * 8
        answers = asyncio.run(complete_all(server, asked, PROMPT, MAX_TOKENS, at_once=20))
        assert answers == [bed.answers[name] for name in asked]
        log = server.log()
        assert "ApiServer_0" in log
        assert "ApiServer_1" in log
        for _ in range(8):  # a new connection each time, so that both servers are asked
            assert complete(connect(server), "nobody", PROMPT, MAX_TOKENS).status == 404
        seen = 0
        while seen < 6:  # in a row: whichever is asked shows the sum of requests, and the one engine's adapters once
            shown = [metric(server, name) for name in ("lora_plugins_requests_total", "vllm:lora_adapter_loaded")]
            seen = seen + 1 if shown == [len(asked), len(NAMES)] else 0
            assert time.monotonic() < ends_at, shown
            time.sleep(0.25)


@pytest.mark.deployment(
    "several API servers", "refused", "without `lora_lru_manager`, or on several hosts (hybrid load balancing): L007"
)
@pytest.mark.parametrize(
    ("plugins", "more", "why"),
    [
        ((RESOLVER,), (), "without lora_lru_manager"),
        ((RESOLVER, MANAGER, ADMIN), ("--data-parallel-hybrid-lb", "--data-parallel-size-local", "2"), "several hosts"),
    ],
    ids=["resolver", "hosts"],
)
def test_several_api_servers_that_cannot_share_do_not_start(
    bed: Bed, tmp_path: Path, plugins: Sequence[str], more: Sequence[str], why: str
) -> None:
    said = why_it_ends(bed, tmp_path, "--data-parallel-size", "2", *more, plugins=plugins)
    assert "[L007]" in said
    assert why in said
    assert "--api-server-count 1" in said
    assert "Starting to load model" not in said, "it is refused before anything is loaded"


def rust_front_end(home: Path) -> dict[str, str]:
    """Variables with which vLLM starts a stand-in for its front end in Rust: its CPU build has none."""
    program = home / "vllm-rs"
    program.write_text(f"#!{sys.executable}\n{FRONT_END}")
    program.chmod(0o755)
    return {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(program)}


@pytest.mark.deployment("front end in Rust", "refused", "with a resolver, `lora_admin` or a policy: L007")
@pytest.mark.parametrize("plugins", [(RESOLVER,), (RESOLVER, MANAGER, ADMIN)], ids=["resolver", "admin"])
def test_the_rust_front_end_leaves_nothing_out_unsaid(bed: Bed, tmp_path: Path, plugins: Sequence[str]) -> None:
    said = why_it_ends(bed, tmp_path / "home", plugins=plugins, **rust_front_end(tmp_path))
    assert "[L007]" in said
    assert "unset VLLM_USE_RUST_FRONTEND" in said
    assert "Starting to load model" not in said, "it is refused before anything is loaded"


@pytest.mark.deployment("front end in Rust", "tested", "manager and kernels alone (a stand-in for `vllm-rs`)")
def test_manager_and_kernels_start_behind_the_rust_front_end(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    with lora_server(
        bed, tmp_path, plugins=(MANAGER, KERNELS), VLLM_ALLOW_RUNTIME_LORA_UPDATING="0", **rust_front_end(tmp_path)
    ) as server:
        ends_at = time.monotonic() + LONGEST_S
        while "init engine (profile, create kv cache, warmup model)" not in server.log():
            assert time.monotonic() < ends_at, server.log()[-2000:]
            assert httpx.get(f"{server.url}/anything").text == "stand-in"
            time.sleep(0.2)
    assert "[L0" not in server.log()


@pytest.mark.deployment("gRPC server", "refused", "with a resolver, `lora_admin` or a policy: L007")
def test_the_grpc_server_leaves_nothing_out_unsaid(bed: Bed, tmp_path: Path) -> None:
    said = why_it_ends(bed, tmp_path, "--grpc", plugins=(RESOLVER, MANAGER))
    assert "[L007]" in said
    assert "leave --grpc out" in said


@pytest.mark.deployment(
    "pipeline parallel",
    "vllm",
    "its CPU worker in eager mode: `AssertionError` of `intermediate_tensors`",
)
@pytest.mark.parametrize("plugins", [(), (RESOLVER, MANAGER, KERNELS)], ids=["without us", "with us"])
def test_pipeline_parallelism_fails_in_vllms_own_cpu_worker(bed: Bed, tmp_path: Path, plugins: Sequence[str]) -> None:
    (tmp_path / "adapters").mkdir()
    with lora_server(bed, tmp_path, "--pipeline-parallel-size", "2", plugins=plugins) as server:
        asked = httpx.post(
            f"{server.url}/v1/completions", json={"model": str(bed.base), "prompt": "x"}, timeout=LONGEST_S
        )
        assert asked.status_code == 500
        log = server.log()
    assert "assert self.intermediate_tensors is not None" in log


@pytest.mark.deployment("pipeline parallel", "tested", "with the buffer that this worker lacks")
def test_two_stages_equal_peft_with_the_buffer_between_them(bed: Bed, tmp_path: Path) -> None:
    shutil.copytree(bed.adapters, tmp_path / "adapters")
    with lora_server(
        bed, tmp_path, "--max-loras", "2", "--max-cpu-loras", "3", "--pipeline-parallel-size", "2",
        "--worker-extension-cls", "testbed.worker_memory.WorkerMemory",
        plugins=(RESOLVER, MANAGER, KERNELS), VLLM_SERVER_DEV_MODE="1",
    ) as server:  # fmt: skip
        made = httpx.post(
            f"{server.url}/collective_rpc", json={"method": "make_buffer_between_stages"}, timeout=LONGEST_S
        )
        assert made.status_code == 200, made.text
        asked = NAMES * 4
        answers = asyncio.run(complete_all(server, asked, PROMPT, MAX_TOKENS, at_once=8))
        assert answers == [bed.answers[name] for name in asked]
