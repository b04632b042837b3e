"""The life of an adapter, from its first request until it is gone from the store, as a real server reports it.

    make bench-life

A server with two slots has adapters from S3. Clients ask for an adapter that the server has never heard of; a new
version comes while a long answer of the old version runs; two other adapters take both slots; the adapter is asked for
again; it is unloaded while an answer runs; and another adapter needs its room in the store.

Six witnesses, each with its times: the client, S3 (a proxy before it), the server's log, `GET /v1/loras`, the workers
(`get_lora_metrics`), and the store's directory. What is polled is dated when it was first seen. The events go to
benchmarks/results/life.json, and the picture to docs/images/life.svg. Read the order, not the milliseconds.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx

from benchmarks import life_plot
from benchmarks.live_kills import until
from benchmarks.record import keep
from testbed.bed import CACHE, Bed, prepare
from testbed.models import PROMPT
from testbed.proxy import FaultProxy, fault_proxy
from testbed.s3 import Bucket, s3_server
from testbed.server import Server, vllm_server

NAME, FIRST, SECOND = "sql", "sql", "stable"  # the adapter, and whose weights its two versions have
OTHERS, LAST = ("chat", "team/poet"), "wide"
SHORT, LONG = 8, 80  # tokens
POLL_S, WAIT_S = 0.005, 120.0
VIEW = ("state", "digest", "tiers", "requests_in_flight", "requests_held")
LOG_LINE = re.compile(r"^(\d+\.\d+) .*?\] (Adapter '.*)$", re.MULTILINE)


class Life:
    """What happened, in the order in which it was noted."""

    def __init__(self) -> None:
        self.began = time.time()
        self.events: list[dict[str, Any]] = []

    def note(self, teller: str, event: str, at: float | None = None, **further: object) -> None:
        at = time.time() if at is None else at
        self.events.append({"at_s": round(at - self.began, 4), "teller": teller, "event": event, **further})

    def ask(self, server: Server, label: str, name: str, tokens: int) -> None:
        """Stream an answer; note when it is asked for, when its first token comes, and its end."""
        body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self.note("client", "asks", request=label, name=name)
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=WAIT_S) as it:
            it.raise_for_status()
            digest, is_first = it.headers["x-lora-digest"].strip('"'), True
            for line in it.iter_lines():
                if is_first and line.startswith("data: {"):
                    self.note("client", "first token", request=label, name=name, digest=digest)
                    is_first = False
        self.note("client", "ends", request=label, name=name, digest=digest)

    @contextmanager
    def asking(self, server: Server, label: str, name: str, tokens: int) -> Iterator[None]:
        """The same, beside the block, which begins after the first token."""
        asked = threading.Thread(target=self.ask, args=(server, label, name, tokens))
        asked.start()
        until(
            lambda: any(it["event"] == "first token" and it["request"] == label for it in self.of("client")),
            f"a token of {label}",
        )
        yield
        asked.join()

    def of(self, teller: str) -> list[dict[str, Any]]:
        return [event for event in [*self.events] if event["teller"] == teller]

    @contextmanager
    def watched(self, server: Server, store: Path) -> Iterator[None]:
        """Note each change of what the API, the workers and the store's directory say."""
        is_over = threading.Event()

        def watch_server() -> None:
            with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
                views: dict[str, dict[str, Any]] = {}
                held: dict[str, Any] = {}
                while not is_over.wait(POLL_S):
                    rows = client.get("/v1/loras").raise_for_status().json()["loras"]
                    listed = {row["lora_name"]: {key: row[key] for key in VIEW} for row in rows}
                    for name in sorted({*listed, *views}):
                        if listed.get(name) != views.get(name):
                            self.note("api", "view", name=name, **listed.get(name, {}))
                    views = listed
                    answer = client.post("/collective_rpc", json={"method": "get_lora_metrics"}).raise_for_status()
                    if (now := in_worker(answer.json()["results"][0])) != held:
                        self.note("worker", "adapters", **now)
                        held = now

        def watch_store() -> None:
            stored: set[str] = set()
            while not is_over.wait(POLL_S):
                there = {it.name for it in os.scandir(store) if re.fullmatch("[0-9a-f]{64}", it.name)}
                for digest in sorted(there ^ stored):
                    self.note("store", "there" if digest in there else "gone", digest=digest)
                stored = there

        watching = [threading.Thread(target=watch) for watch in (watch_server, watch_store)]
        for one in watching:
            one.start()
        try:
            yield
            time.sleep(1.0)
        finally:
            is_over.set()
            for one in watching:
                one.join()


def in_worker(said: Any) -> dict[str, Any]:
    """Engine ids of the versions in a worker's host memory, and how many of them are in slots."""
    said = json.loads(said) if isinstance(said, str) else said
    return {"engine_ids": sorted(map(int, said["memory"]["adapter_mb"])), "in_slots": said["adapters"]["active"]}


def live(life: Life, server: Server, bed: Bed, bucket: Bucket, store: Path) -> None:
    """Everything that happens to the adapter."""
    client = httpx.Client(base_url=server.url, timeout=WAIT_S)

    def tiers() -> list[str]:
        return list(client.get(f"/v1/loras/{NAME}").raise_for_status().json()["tiers"])

    def stage(name: str) -> None:
        time.sleep(0.5)
        life.note("client", "stage", stage=name)

    client.post("/v1/completions", json={"model": "nobody", "prompt": PROMPT})  # the first look-up of all reads more
    stage("first request")
    life.ask(server, "first", NAME, SHORT)
    stage("new version")
    with life.asking(server, "long", NAME, LONG):
        bucket.put_directory(f"loras/{NAME}", bed.adapters / SECOND)
        life.note("client", "refresh")
        swapped = client.post(f"/v1/loras/{NAME}/refresh").raise_for_status().json()
        life.note("client", "refreshed", digest=swapped["digest"])
        life.ask(server, "after", NAME, SHORT)
    stage("back from host memory")
    for other in OTHERS:
        life.ask(server, other, other, SHORT)
    until(lambda: tiers() == ["store", "host"], "the adapter is out of its slot")
    life.ask(server, "again", NAME, SHORT)
    stage("unloaded")
    with life.asking(server, "last", NAME, LONG):
        life.note("client", "unload")
        client.delete(f"/v1/loras/{NAME}").raise_for_status()
        life.note("client", "unloaded")
    life.ask(server, LAST, LAST, SHORT)
    digests = {it["digest"] for it in life.of("client") if it.get("name") == NAME and "digest" in it}
    until(lambda: not any((store / digest).exists() for digest in digests), "both versions are gone from the store")


def told(life: Life, server: Server, proxy: FaultProxy) -> None:
    """What S3 was asked and the server's log says, with its times."""
    offset = time.time() - time.monotonic()
    for request in proxy.requests():
        if request.ended is not None:
            file = request.path.rpartition("/")[2] if request.path.count("/") > 2 else ""
            took_s = round(request.ended - request.began, 4)
            life.note("s3", request.method, request.began + offset, took_s=took_s, name=_name(request), file=file)
    for at, text in LOG_LINE.findall(server.log()):
        life.note("log", re.sub(r", \S*/([0-9a-f]{64})", r", \1", text), float(at))
    life.events.sort(key=lambda event: event["at_s"])


def _name(request: Any) -> str:
    found = re.search(r"loras(?:/|%2F)(.*?)(?:(?:/|%2F)adapter_|&|$)", request.path + "&" + request.query)
    return unquote(found[1]).rstrip("/") if found else ""


def main() -> None:
    life, bed = Life(), prepare()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        store = Path(directory) / "store"
        s3 = running.enter_context(s3_server())
        proxy = running.enter_context(fault_proxy(s3.url))
        bucket = s3.bucket("adapters")
        for name in (FIRST, *OTHERS, LAST):
            bucket.put_directory(f"loras/{name}", bed.adapters / name)
        sizes = {it: sum(file.stat().st_size for file in (bed.adapters / it).iterdir()) for it in (*OTHERS, LAST)}
        env = {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_PLUGINS": "lora_s3_resolver,lora_lru_manager,lora_admin",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_LOGGING_LEVEL": "DEBUG",
            "VLLM_LOGGING_PREFIX": "%(created).4f ",
            "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}",
            "LORA_PLUGINS_STORE_DIR": str(store),
            # Room for the others and the last: less than a version of the adapter is left.
            "LORA_PLUGINS_STORE_MAX_BYTES": str(sum(sizes.values()) + 100_000),
            "LORA_PLUGINS_REFRESH_S": "0",
            **s3.env(proxy.url),
        }
        arguments = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "8")
        log = CACHE.parent / "life-server.log"
        server = running.enter_context(vllm_server(bed.base, log, arguments=arguments, env=env))
        life.began, load = time.time(), os.getloadavg()[0]
        with life.watched(server, store):
            live(life, server, bed, bucket, store)
        told(life, server, proxy)
    life.events = [event for event in life.events if event["at_s"] >= 0]
    print(keep("life", life.events, load_before=load))
    print(life_plot.plot(life.events))


if __name__ == "__main__":
    main()
