"""Ctrl-C amid a push to three servers: one has taken it, one takes it later, one is dead; real sockets and signal."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading

from tests.http_server import Answer, Asked, http_server

OLD, NEW = "o" * 64, "n" * 64


class Trainee:
    """Serves one name; a slow one answers a push only at the end of the test."""

    def __init__(self, *, is_slow: bool) -> None:
        self.is_slow, self.served = is_slow, OLD
        self.asked, self.ends = threading.Event(), threading.Event()

    def answer(self, asked: Asked) -> Answer:
        if asked.method == "GET":
            return Answer({"digest": self.served, "state": "serving"})
        if asked.method == "POST":
            self.served = OLD
            return Answer({"status": "success"})
        self.asked.set()
        if self.is_slow:
            self.ends.wait(20)
        self.served = NEW
        return Answer({"digest": NEW, "previous_digest": OLD, "swapped": True})


def test_ctrl_c_undoes_a_push_or_names_its_server() -> None:
    quick, slow = Trainee(is_slow=False), Trainee(is_slow=True)
    with http_server(quick.answer) as quick_url, http_server(slow.answer) as slow_url, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # and does not listen
        urls = [quick_url, slow_url, f"http://127.0.0.1:{dead.getsockname()[1]}"]
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
        slow.ends.set()
    assert "KeyboardInterrupt" in said
    assert f"the push is not rolled back: {slow_url}\n" in said
    assert (quick.served, trainer.returncode) == (OLD, -signal.SIGINT)
