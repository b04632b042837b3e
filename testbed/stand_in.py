"""A stand-in for `vllm serve` where a test is about routing or the death of replicas, not about answers.

    python -P -m testbed.stand_in MODEL [--places N] [--load-s S] [--chunk-s S] [--journal FILE] --host H --port P

Streams `max_tokens` chunks of a completion, loads adapters into a least recently used cache of N places, and has the
metrics that a replica reads. Models that begin with `unknown` do not exist. Each request is a line in the journal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import OrderedDict

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route


class StandIn:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.loaded: OrderedDict[str, None] = OrderedDict()
        self.running = 0
        self.registered: set[str] = set()

    def note(self, what: str, name: str) -> None:
        if self.options.journal:
            with open(self.options.journal, "a") as file:
                replica = os.environ.get("LORA_PLUGINS_REPLICA")
                row = {"pid": os.getpid(), "replica": replica, "what": what, "name": name, "at": time.time()}
                file.write(json.dumps(row) + "\n")

    async def complete(self, request: Request) -> object:
        body = await request.json()
        name = body["model"]
        if name.startswith("unknown"):
            return JSONResponse({"error": {"message": f"no {name}", "code": 404}}, 404)
        if name.startswith("failing"):
            return JSONResponse({"error": {"message": f"{name} fails", "code": 500}}, 500)
        self.running += 1
        try:
            is_cold = name != self.options.model and name not in self.loaded
            if is_cold:
                await asyncio.sleep(self.options.load_s)
                self.loaded[name] = None
                while len(self.loaded) > self.options.places:
                    self.loaded.popitem(last=False)
            if name in self.loaded:
                self.loaded.move_to_end(name)
            self.note("cold" if is_cold else "warm", name)
        except BaseException:
            self.running -= 1
            raise
        if body.get("stream"):
            return StreamingResponse(self.chunks(name, body.get("max_tokens", 4)), media_type="text/event-stream")
        text = "".join([str(at) async for at in self.steps(name, body.get("max_tokens", 4))])
        return JSONResponse({"object": "text_completion", "model": name, "choices": [{"index": 0, "text": text}]})

    async def steps(self, name: str, count: int):
        try:
            for at in range(count):
                await asyncio.sleep(self.options.chunk_s)
                yield at
            self.note("done", name)
        except (asyncio.CancelledError, GeneratorExit):
            self.note("aborted", name)
            raise
        finally:
            self.running -= 1

    async def chunks(self, name: str, count: int):
        async for at in self.steps(name, count):
            chunk = {"object": "text_completion", "model": name, "choices": [{"index": 0, "text": f"{at} "}]}
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    async def metrics(self, request: Request) -> PlainTextResponse:
        lines = [f'vllm:num_requests_running{{engine="0"}} {self.running}.0']
        lines += [f'lora_plugins_host_max_adapters{{engine="0"}} {self.options.places}.0']
        lines += [f'vllm:lora_adapter_loaded{{adapter_name="{name}",level="cpu"}} 1.0' for name in self.loaded]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": name} for name in [self.options.model, *self.loaded]]})

    async def loras(self, request: Request) -> JSONResponse:
        if "x-forwarded-for" in request.headers and request.headers.get("authorization") != "Bearer admin":
            return JSONResponse({"error": {"message": "[L008]"}}, 403)
        if request.method == "POST":
            self.registered.add((await request.json())["lora_name"])
        return JSONResponse({"loras": sorted(self.registered)})

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", lambda request: PlainTextResponse("")),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/loras", self.loras, methods=["GET", "POST"]),
            ]
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--places", type=int, default=4)
    parser.add_argument("--load-s", type=float, default=0.05)
    parser.add_argument("--chunk-s", type=float, default=0.02)
    parser.add_argument("--journal")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    uvicorn.run(StandIn(options).app(), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
