"""Callers that cost next to nothing, as they share cores with the server: HTTP by hand, on plain sockets.

`stream` and `load` ask once, on the caller's event loop. `Caller` runs many in a process of their own:

    python -m benchmarks.callers '{"url": …}'

Each of them asks for one answer after the other until standard input ends, on a connection that is closed after
`PER_CONNECTION` answers. Prints a line as the callers begin, and writes all answers into a file at the end.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from testbed.models import PROMPT

PER_CONNECTION = 20
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
WAIT_S = 300.0
SHORT_PROMPT = "The quick brown fox"


async def _post(port: int, path: str, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    status = int((await reader.readline()).split()[1])
    return reader, writer, status


async def stream(
    port: int, model: str, max_tokens: int, times: list[float], prompt: str | list[int] = SHORT_PROMPT
) -> None:
    """Append the time of each token to `times`."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    reader, writer, status = await _post(port, "/v1/completions", body)
    try:
        if status != 200:
            raise RuntimeError(f"{model}: {status}: {(await reader.read()).decode(errors='replace')[-500:]}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                if line.startswith(b'data: {"error"'):
                    raise RuntimeError(line.decode())
    finally:
        writer.close()


def gaps_s(answers: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Gaps between tokens that end in the window; so the gap that an event at `start` lengthens is among them."""
    return [later - earlier for times in answers for earlier, later in pairwise(times) if start < later <= end]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def first_token_s(port: int, model: str, max_tokens: int, prompt: str | list[int] = SHORT_PROMPT) -> float:
    """Seconds to the first token of a streamed answer, at whose end this returns."""
    times: list[float] = []
    began = time.perf_counter()
    await stream(port, model, max_tokens, times, prompt)
    return times[0] - began


async def load(port: int, name: str, path: str) -> None:
    """Make an adapter known, as vLLM's API has it."""
    reader, writer, status = await _post(port, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    text = (await reader.read()).decode(errors="replace")
    writer.close()
    if status != 200:
        raise RuntimeError(f"{name}: {status}: {text[-500:]}")


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        began_at: of time.monotonic(), which all processes of a machine share.
        status: of HTTP; 0 where there was no server to connect to, -1 where the connection broke before the answer.
        digest: what the answer says of its version.
    """

    began_at: float
    status: int
    digest: str
    ids: list[int]


class Caller:
    """Inside, `at_once` callers ask for `names` in turn; `answers` are there afterwards.

    Attributes:
        core: the share of one core that the callers took; near 1, they are the bottleneck.
        per_s: answers with status 200, per second.
    """

    def __init__(self, url: str, names: Sequence[str], tokens: int, at_once: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-callers-")
        self._file = Path(self._folder.name) / "answers.json"
        self._asked = {"url": url, "names": list(names), "tokens": tokens, "at_once": at_once, "file": str(self._file)}
        self.answers: list[Answer] = []
        self.core = self.per_s = 0.0

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.callers", json.dumps(self._asked)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the callers have not begun")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()
        self._process.stdout.close()
        if self._process.wait(WAIT_S) == 0:
            said = json.loads(self._file.read_text())
            self.answers = [Answer(*one) for one in said["answers"]]
            self.core = said["core"]
            self.per_s = sum(it.status == 200 for it in self.answers) / said["took_s"]
        self._folder.cleanup()


async def ask(url: str, names: list[str], tokens: int, at_once: int, file: str) -> None:
    """In the process of the callers."""
    place, answers, number = urlsplit(url), list[Answer](), 0
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    def request_of(name: str) -> bytes:
        body = json.dumps({"model": name, "prompt": PROMPT, "max_tokens": tokens, **GREEDY}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    requests = {name: request_of(name) for name in names}

    async def call() -> None:
        nonlocal number
        while not ended.done():
            try:
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
            except OSError:
                answers.append(Answer(time.monotonic(), 0, "", []))
                await asyncio.sleep(0.1)
                continue
            for _ in range(PER_CONNECTION):
                if ended.done():
                    break
                name = names[number % len(names)]
                number += 1
                began_at = time.monotonic()
                try:
                    writer.write(requests[name])
                    status, headers, body = await _answer(reader)
                except (OSError, EOFError, asyncio.IncompleteReadError):
                    answers.append(Answer(began_at, -1, "", []))
                    break
                ids = json.loads(body)["choices"][0]["token_ids"] if status == 200 else []
                digest = headers.get("x-lora-digest", "")
                answers.append(Answer(began_at, status, digest, ids))
            writer.close()

    print(flush=True)
    began, used_s = time.monotonic(), time.process_time()
    await asyncio.gather(*(call() for _ in range(at_once)))
    took_s = time.monotonic() - began
    said = {"took_s": took_s, "core": round((time.process_time() - used_s) / took_s, 2)}
    Path(file).write_text(json.dumps({**said, "answers": [astuple(it) for it in answers]}))


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


if __name__ == "__main__":
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    asyncio.run(ask(**arguments))
