"""Run commands in this process, with an environment of their own, and compare what they print with golden files."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from lora_plugins.cli.commands import run
from testbed.forking_vllm import run_forked

GOLDEN = Path(__file__).parent / "golden"
RENEW = "RENEW_GOLDEN"  # RENEW_GOLDEN=1 pytest tests/cli writes the files again; look at the difference before a commit
_OTHERS = (
    *("LORA_PLUGINS_", "VLLM_", "S3_", "LOCAL_PATH", "AWS_", "HF_", "HUGGING"),
    *("COLUMNS", "NO_COLOR", "FORCE_COLOR"),
)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def only(self) -> Any:
        """The answer for the only name asked for."""
        (answer,) = self.json["adapters"]
        return answer

    def assert_no_traceback(self) -> None:
        assert "Traceback" not in self.out + self.err
        assert "This should not happen" not in self.out + self.err


class Cli:
    """Runs commands; `env` is all of our, vLLM's and the sources' variables that they see."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.store = root / "store"
        self.adapters = root / "adapters"
        self.env: dict[str, str] = {
            "LORA_PLUGINS_STORE_DIR": str(self.store),
            "VLLM_PLUGINS": "lora_filesystem_resolver",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(self.adapters),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "LORA_PLUGINS_URL": "http://127.0.0.1:9",  # where no server is
        }
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Done:
        logger = logging.getLogger()
        handlers, level = list(logger.handlers), logger.level
        with self._monkeypatch.context() as patch:
            for name in list(os.environ):
                if name.startswith(_OTHERS):
                    patch.delenv(name)
            for name, value in self.env.items():
                patch.setenv(name, value)
            self._capsys.readouterr()
            code = run([str(argument) for argument in arguments])
            out, err = self._capsys.readouterr()
        logger.handlers[:] = handlers  # --debug puts its own there
        logger.setLevel(level)
        return Done(code, out, err)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """This process's, with `env` in the place of what commands read."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)} | dict(env)


def started(
    *arguments: str | Path, env: Mapping[str, str], before: str = "", **files: int | IO[str]
) -> subprocess.Popen[str]:
    """Start a command as a process of its own, as a shell does; `before` is Python that runs first."""
    code = f"{before}\nfrom lora_plugins.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **files}
    return subprocess.Popen(command, env=environment(env), text=True, **pipes)


def ended(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=240)
    return Done(process.returncode, out, err)


def outside(*arguments: str | Path, env: Mapping[str, str]) -> Done:
    """Run a command in a fork of a process that has imported what commands import."""
    command = ["lora-plugins", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as home:
        done = run_forked("lora_plugins.cli:main", command, environment=environment(env), home=Path(home))
    return Done(done.returncode, done.stdout, done.stderr)


def on_terminal(cli: Cli, *arguments: str, env: Mapping[str, str]) -> str:
    """All that a command writes to a terminal of its own."""
    ours, theirs = pty.openpty()
    process = started(*arguments, env=cli.env | env, stdout=theirs, stderr=theirs)
    text, has_ended = b"", False
    while not has_ended:
        has_ended = process.poll() is not None
        while select.select([ours], [], [], 0.02)[0]:
            text += os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    return text.decode()


def golden(name: str, done: Done, root: Path) -> None:
    """Compare both streams and the exit code with a golden file; paths, times and file identities are made equal."""
    text = f"exit {done.code}\n--- stdout\n{done.out}--- stderr\n{done.err}"
    text = text.replace(str(root), "<root>")
    for pattern, instead in (
        (r"version [0-9a-f]{12}", "version <version>"),
        (r'"version": "[0-9a-f]{64}"', '"version": "<version>"'),
        (r'"(used_at|fetched_at|elapsed_s|bytes_s)": ("?)[^",\n]+("?)', r'"\1": <time>'),
        (r"in \d+\.\d\d s", "in <time>"),
        (r"\([\d.]+ k?B/s\)", "(<speed>)"),
        (r"\d+ s ago ?", "now     "),
        (r"vLLM 0\.3\d\S*", "vLLM <version>"),
        (r"all \d+ places", "all <n> places"),
        (r"[\d.]+ [GT]B free", "<free> free"),
    ):
        text = re.sub(pattern, instead, text)
    file = GOLDEN / name
    if os.environ.get(RENEW):
        file.write_text(text)
    assert text == file.read_text()
