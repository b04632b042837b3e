"""All forms of one kind on one engine, with the plugins that are named: again from the next form where it broke."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.forking_vllm import fork
from testbed.frameworks.forms import ASYNC, ASYNC_TP, FORMS, OF_VERL, SERVE
from testbed.frameworks.runner import MARK, run_forms
from testbed.frameworks.versions import RANK, Versions
from testbed.server import outer_environment, vllm_server

OURS = ("lora_lru_manager", "lora_kernels")
LONGEST_S = 400.0
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def names_of(kind: str) -> list[str]:
    return [form.name for form in FORMS if form.kind == kind]


def run_kind(
    kind: str, versions: Versions, home: Path, plugins: Sequence[str], names: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The row of each form by its name; where the engine ended without a row, `whose` is "ended"."""
    environment = {
        **outer_environment(),
        **_ENVIRONMENT,
        "VLLM_PLUGINS": ",".join(plugins),
        "LORA_PLUGINS_STORE_DIR": str(home / "store"),
    }
    home.mkdir(parents=True, exist_ok=True)
    question = {"kind": kind, "base": str(versions.base), "root": str(versions.root), "home": str(home)}
    run = _on_a_server if kind == SERVE else _in_a_process
    rows: dict[str, dict[str, Any]] = {}
    left = list(names or names_of(kind))
    while left:
        found = run({**question, "forms": left}, versions, home, environment)
        rows |= {row["form"]: row for row in found}
        if not found:
            rows[left[0]] = {"form": left[0], "whose": ["ended"], "said": [], "calls": []}
        left = [name for name in left if name not in rows]
    return rows


def _in_a_process(
    question: dict[str, Any], versions: Versions, home: Path, environment: dict[str, str]
) -> list[dict[str, Any]]:
    output = home / f"output-{len(list(home.iterdir()))}"
    is_async = question["kind"] in {ASYNC, ASYNC_TP, OF_VERL}
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(is_async))}
    arguments = ["runner", json.dumps(question)]
    process = fork("testbed.frameworks.runner:main", arguments, environment={**environment, **more}, output=output)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LONGEST_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with an engine's own processes
    lines = output.read_text(errors="replace").splitlines()
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]


def _on_a_server(
    question: dict[str, Any], versions: Versions, home: Path, environment: dict[str, str]
) -> list[dict[str, Any]]:
    log = home / f"server-{len(list(home.iterdir()))}.log"
    arguments = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2", "--max-cpu-loras", "4",
                 "--max-model-len", "1000", "--block-size", "32")  # fmt: skip
    more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with vllm_server(
        versions.base, log, arguments=arguments, env={**environment, **more}, is_forking=True,
        program="testbed.frameworks.routes:main",
    ) as server:  # fmt: skip
        return asyncio.run(run_forms({**question, "url": server.url}, versions.answers))
