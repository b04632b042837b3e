"""nginx as two pages set it up: it waits for a first request, and it adds the key that a trainer does not send."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from testbed.bed import Bed
from testbed.pages import blocks
from testbed.server import reserved_port
from tests.e2e.servers import admin_server
from tests.walkthroughs import debian
from tests.walkthroughs.reader import ROOT, Do, Reader, Step, Walk, left_out

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

BY_DEFAULT_S = 60  # nginx' own limit, which the page names
SILENT_S = BY_DEFAULT_S + 2
BETWEEN_TOKENS_S = 2
FIRST_REQUEST = Walk(
    "docs/guides/first-request.md",
    [
        Step("location /v1/ {", Do.WRITE, "location.conf"),
        left_out(
            "Adapter 'team/sql' is still being fetched from s3 after 35 s: 350.1 of 1200.0 MB are here",
            "a line of the log; tests/test_guides.py::test_progress_of_first_requests_is_shown_as_logged",
        ),
    ],
    {"127.0.0.1:8000": ("127.0.0.1:{upstream}", "a slow server of this test")},
)
HTTP = """
daemon off;
pid {folder}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/servers.conf;
}}
"""
SERVERS = """
server {{ listen 127.0.0.1:{port}; include {folder}/location.conf; }}
server {{ listen 127.0.0.1:{plain}; location / {{ proxy_pass http://127.0.0.1:{upstream}; }} }}
"""
KEY = "administrators"


class Slow(BaseHTTPRequestHandler):
    """Silent while an adapter is fetched, then two tokens of a stream."""

    def do_GET(self) -> None:
        time.sleep(SILENT_S if self.path == "/v1/cold" else 0)
        self.send_response(200)
        self.end_headers()
        for number in range(2):
            time.sleep(number * BETWEEN_TOKENS_S)
            self.wfile.write(b"data: token\n\n")
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextmanager
def nginx(folder: Path, url: str) -> Iterator[None]:
    program = debian.folder_of(*debian.NGINX) / "nginx"
    (folder / "nginx.conf").write_text(HTTP.format(folder=folder))
    command = [program, "-e", "stderr", "-p", folder, "-c", folder / "nginx.conf"]
    tried = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False, timeout=60)
    assert tried.returncode == 0, tried.stderr
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for _ in range(100):
                try:
                    httpx.get(url)
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            yield
        finally:
            process.terminate()


def test_nginx_waits_for_a_first_request(tmp_path: Path, upstream: int) -> None:
    with reserved_port() as port, reserved_port() as plain:
        pass  # nginx sets no SO_REUSEPORT
    values = {"upstream": str(upstream)}
    Reader(FIRST_REQUEST, tmp_path, {}, values, "").read()
    (tmp_path / "servers.conf").write_text(SERVERS.format(folder=tmp_path, port=port, plain=plain, upstream=upstream))
    url, without = f"http://127.0.0.1:{port}/v1", f"http://127.0.0.1:{plain}/v1"
    with nginx(tmp_path, f"{url}/warm"), ThreadPoolExecutor() as pool:
        cold, given_up = (pool.submit(httpx.get, f"{at}/cold", timeout=SILENT_S + 30) for at in (url, without))
        with httpx.stream("GET", f"{url}/warm", timeout=30) as stream:
            arrived = [time.monotonic() for _ in stream.iter_raw()]
        assert arrived[-1] - arrived[0] > BETWEEN_TOKENS_S / 2, "tokens arrive one by one"
        assert cold.result().status_code == 200
        assert given_up.result().status_code == 504


def test_nginx_adds_the_key_for_a_trainers_address(tmp_path: Path, bed: Bed) -> None:
    (text,) = (block.text for block in blocks((ROOT / "docs/guides/rl.md").read_text()) if block.first == "server {")
    with reserved_port() as port:
        pass
    url, trainer = f"http://127.0.0.1:{port}", httpx.HTTPTransport(local_address="127.0.0.2")
    (tmp_path / "adapters").mkdir()
    with admin_server(bed, tmp_path, LORA_PLUGINS_ADMIN_KEY=KEY) as server:
        for stands, here in (
            ("10.0.0.5:8001", f"127.0.0.1:{port}"), ("10.0.0.7", "127.0.0.2"),
            ("http://127.0.0.1:8000", server.url), ("Bearer KEY", f"Bearer {KEY}"),
        ):  # fmt: skip
            assert stands in text
            text = text.replace(stands, here)
        (tmp_path / "servers.conf").write_text(text)
        load = {"lora_name": "trl-policy-v1", "lora_path": str(bed.adapters / "sql"), "load_inplace": False}
        ask = {"model": "trl-policy-v1", "prompt": "SELECT", "max_tokens": 2}
        calls = (
            ("/pause?mode=keep", None), ("/v1/load_lora_adapter", load), ("/resume", None), ("/v1/completions", ask),
            ("/v1/unload_lora_adapter", {"lora_name": "trl-policy-v1"}),
        )  # fmt: skip
        with nginx(tmp_path, url), httpx.Client(base_url=url, transport=trainer, timeout=60) as client:
            assert client.get("/server_info", params={"config_format": "json"}).status_code == 200
            assert [client.post(path, json=body).status_code for path, body in calls] == [200] * len(calls)
            assert httpx.post(f"{url}/v1/load_lora_adapter", json=load).status_code == 403, "not the trainer's address"
            assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=load).status_code == 401, "past nginx, no key"
