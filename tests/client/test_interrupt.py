"""Ctrl-C amid a push to three servers: one has taken it, one takes it later, one is dead; real sockets and signal."""

from __future__ import annotations

import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

OLD, NEW = "o" * 64, "n" * 64


class Trainee(http.server.ThreadingHTTPServer):
    """Serves one name; a slow one answers a push only at the end of the test."""

    def __init__(self, *, is_slow: bool) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.is_slow, self.served = is_slow, OLD
        self.asked, self.ends = threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Answering(http.server.BaseHTTPRequestHandler):
    server: Trainee

    def do_PUT(self) -> None:
        self.server.asked.set()
        if self.server.is_slow:
            self.server.ends.wait(20)
        self.server.served = NEW
        self.answer({"digest": NEW, "previous_digest": OLD, "swapped": True})

    def do_POST(self) -> None:
        self.server.served = OLD
        self.answer({"status": "success"})

    def do_GET(self) -> None:
        self.answer({"digest": self.server.served, "state": "serving"})

    def answer(self, body: dict[str, object]) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[Trainee]]:
    made = [Trainee(is_slow=False), Trainee(is_slow=True)]
    yield made
    for server in made:
        server.ends.set()
        server.shutdown()
        server.server_close()


def test_ctrl_c_undoes_a_push_or_names_its_server(servers: list[Trainee]) -> None:
    quick, slow = servers
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # and does not listen
        urls = [quick.url, slow.url, f"http://127.0.0.1:{dead.getsockname()[1]}"]
        pushes = f"push('sql', {{'w': numpy.zeros(2)}}, {{'r': 1}}, servers={urls!r})"
        # A shell ignores the signal in what it starts in the background, and so do all children.
        heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        code = f"{heeds}; import numpy; from lora_plugins.client import push; {pushes}"
        with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as trainer:
            assert quick.asked.wait(30)
            assert slow.asked.wait(30)
            threading.Event().wait(0.2)  # the quick answer arrives
            trainer.send_signal(signal.SIGINT)
            said = trainer.communicate(timeout=30)[1]
    assert "KeyboardInterrupt" in said
    assert f"the push is not rolled back: {slow.url}\n" in said
    assert (quick.served, trainer.returncode) == (OLD, -signal.SIGINT)
