"""Pages of docs/get-started, followed to the letter: each ends with an adapter that answers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed.bed import prepare
from testbed.server import Server, reserved_port, shell_server

ROOT = Path(__file__).resolve().parents[2]
# What neither page needs, and this machine does.
SMALL = "--host 127.0.0.1 --max-num-seqs 8 --max-num-batched-tokens 256"


def commands(page: str) -> list[str]:
    """The blocks of commands of a page, in its order."""
    text = (ROOT / "docs" / "get-started" / page).read_text()
    return re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def answers(server: Server, asking: str) -> Iterator[Any]:
    """Each JSON object that the page's curls print."""
    asking = asking.replace("localhost:8000", server.url.removeprefix("http://")).replace("curl ", "curl -sS ")
    text = subprocess.run(["bash", "-euc", asking], check=True, capture_output=True, text=True).stdout
    while text.strip():
        answer, end = json.JSONDecoder().raw_decode(text.lstrip())
        yield answer
        text = text.lstrip()[end:]


def last(serving: str, port: int) -> str:
    """The commands, the last of which serves on this port."""
    return f"{serving.rstrip()} {SMALL} --port {port}"


def test_the_page_for_the_cpu(tmp_path: Path) -> None:
    set_up, models, serving, asking = commands("cpu.md")
    assert set_up == "make set-up\n"
    env = {"LORA_PLUGINS_STORE_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    adapters = sorted(path.name for path in prepare().adapters.iterdir())
    with (
        reserved_port() as port,
        shell_server(f"cd {ROOT}\n{models}{last(serving, port)}", port, tmp_path / "log", env) as server,
    ):
        (answer,) = answers(server, asking)
        assert answer["model"] == "sql"
        assert answer["usage"]["completion_tokens"] == 8
        assert server.log().splitlines()[: len(adapters)] == adapters, "what `ls $ADAPTERS` shows"


def test_the_page_without_a_network(tmp_path: Path) -> None:
    _, _, carrying, serving, asking = commands("air-gapped.md")
    bed = prepare()
    root = tmp_path / "adapters"
    root.mkdir()
    places = {
        "/adapters": root,
        "./sql": bed.adapters / "sql",
        "/media/sql": bed.adapters / "sql",
        "/models/base": bed.base,
    }

    def placed(text: str) -> str:
        for there, here in places.items():
            text = text.replace(there, str(here))
        return text

    small = " --dtype float32 --enforce-eager --max-model-len 256"
    env = {"LORA_PLUGINS_STORE_DIR": str(tmp_path / "store"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        reserved_port() as port,
        shell_server(placed(carrying) + last(placed(serving), port) + small, port, tmp_path / "log", env) as server,
    ):
        by_name, by_uri = answers(server, placed(asking))
        assert by_name["model"] == "sql"
        assert by_name["choices"][0]["text"]
        assert by_uri["lora_name"] == "by-uri"
        assert by_uri["digest"]
        assert "would be served" in server.log()
