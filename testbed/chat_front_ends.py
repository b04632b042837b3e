"""What people put before a server for chats: LiteLLM's proxy and Open WebUI, each in an environment of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from testbed.server import reserved_port

LITELLM, OPEN_WEBUI = shutil.which("litellm"), shutil.which("open-webui")
KEY = "sk-of-this-test-4f1c92ab7e55d08812cd"
_START_TIMEOUT_S = 600
_REQUEST_TIMEOUT_S = 240


@contextmanager
def litellm(folder: Path, config: str) -> Iterator[httpx.Client]:
    """LiteLLM's proxy with a configuration; the client has the proxy's key."""
    (folder / "config.yaml").write_text(config)
    own = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": os.environ["PATH"]}
    with _started([str(LITELLM), "--config", "config.yaml"], folder, own, "/health/liveliness") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


@contextmanager
def open_webui(folder: Path, settings: Mapping[str, str]) -> Iterator[httpx.Client]:
    """Open WebUI without accounts, network and Ollama; the client is signed in."""
    own = {
        "PATH": f"{Path(str(OPEN_WEBUI)).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "DATA_DIR": str(folder / "data"),
        "WEBUI_SECRET_KEY": KEY,
        "WEBUI_AUTH": "False",
        "OFFLINE_MODE": "true",
        "HF_HUB_OFFLINE": "1",
        "ENABLE_OLLAMA_API": "false",
        "RAG_EMBEDDING_ENGINE": "openai",  # another fetches a model as it starts
        **settings,
    }
    with _started([str(OPEN_WEBUI), "serve"], folder, own, "/health") as client:
        signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).raise_for_status()
        client.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"
        yield client


@contextmanager
def _started(command: Sequence[str], folder: Path, env: Mapping[str, str], health: str) -> Iterator[httpx.Client]:
    with reserved_port() as port:
        pass  # these servers set no SO_REUSEPORT
    log_file = folder / f"{Path(command[0]).name}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder, env=dict(env), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_REQUEST_TIMEOUT_S) as client:
            _wait_until_healthy(client, health, process, log_file)
            yield client
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def _wait_until_healthy(client: httpx.Client, path: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    ends_at = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < ends_at:
        if process.poll() is not None:
            raise RuntimeError(f"{log_file.stem} ended with {process.returncode}:\n{log_file.read_text()[-4000:]}")
        try:
            if client.get(path).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"{log_file.stem} is not healthy:\n{log_file.read_text()[-4000:]}")
