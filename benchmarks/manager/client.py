"""A client that costs next to nothing, as it shares a core with the server: HTTP by hand, the time of each token."""

from __future__ import annotations

import asyncio
import json
import time

PROMPT = "The quick brown fox"


async def _post(port: int, path: str, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    status = int((await reader.readline()).split()[1])
    return reader, writer, status


async def stream(port: int, model: str, max_tokens: int, times: list[float], prompt: str | list[int] = PROMPT) -> None:
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


async def post(port: int, path: str, body: dict) -> int:
    """Ask for something whose answer does not matter; returns the status."""
    reader, writer, status = await _post(port, path, body)
    try:
        await reader.read()
    finally:
        writer.close()
    return status


async def load(port: int, name: str, path: str) -> None:
    """Make an adapter known, as vLLM's API has it."""
    reader, writer, status = await _post(port, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    text = (await reader.read()).decode(errors="replace")
    writer.close()
    if status != 200:
        raise RuntimeError(f"{name}: {status}: {text[-500:]}")
