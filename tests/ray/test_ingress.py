"""Replicas on real Ray: where requests go, what comes of a replica's death, and scaling under load."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import openai
import psutil
import pytest
from openai.types import Completion

from lora_plugins.ray.replica import REPLICA_HEADER
from tests.ray.conftest import App, Start, counted, wait_for


def ask(app: App, name: str, tokens: int = 2) -> tuple[int, str]:
    """The status of a completion, and which replica answered."""
    with app.http() as client:
        answer = client.post("/v1/completions", json={"model": name, "max_tokens": tokens})
    return answer.status_code, answer.headers.get(REPLICA_HEADER, "")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def app(start: Start) -> App:
    """Once its router knows both replicas: until then all names are one's."""
    running = start(2, places=12)
    wait_for(lambda: len({ask(running, "base")[1] for _ in range(8)}) == 2)
    return running


def test_all_adapters_are_loaded_once_and_stay(app: App) -> None:
    names = [f"stays-{number}" for number in range(24)]
    first = {name: ask(app, name) for name in names}
    again = {name: ask(app, name) for name in names}
    assert again == first
    assert {status for status, _ in first.values()} == {200}
    cold = counted(app.noted("cold"))
    assert [cold[name] for name in names] == [1] * 24


def test_each_server_has_the_name_of_its_replica(app: App) -> None:
    """By which its list in the store is found: of a replica that ended, no list is taken for this one's."""
    _, replica = ask(app, "named")
    assert [row["replica"] for row in app.noted("cold", "named")] == [replica]


def test_unmodified_client_streams(app: App) -> None:
    stream = app.client().completions.create(model="streamed", prompt="x", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "0 1 2 "
    assert app.client().completions.create(model="base", prompt="x", max_tokens=3).choices[0].text == "012"


def test_server_refuses_what_does_not_exist(app: App) -> None:
    with pytest.raises(openai.NotFoundError, match="no unknown-adapter"):
        app.client().completions.create(model="unknown-adapter", prompt="x")


def test_an_error_of_a_healthy_server_is_passed_on(app: App) -> None:
    status, replica = ask(app, "failing")
    assert status == 500
    assert replica in app.replicas()


def test_request_of_a_client_that_leaves_is_aborted(app: App) -> None:
    stream = app.client().completions.create(model="left", prompt="x", max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: app.noted("aborted", "left"))


def test_admin_calls_reach_every_replica_and_say_so(app: App) -> None:
    key = {"Authorization": "Bearer admin"}
    with app.http() as client:
        answer = client.post("/v1/loras", json={"lora_name": "sql"}, headers=key)
        assert answer.status_code == 200
        rows = answer.json()["replicas"]
        assert {row["replica"] for row in rows} == set(app.replicas())
        assert [(row["status"], row["body"]) for row in rows] == [(200, {"loras": ["sql"]})] * 2
        # From this machine too: a replica cannot know for whom it is asked.
        refused = client.get("/v1/loras")
        assert (refused.status_code, "L008" in refused.text) == (403, True)


def test_models_of_all_replicas_are_listed(app: App) -> None:
    for number in range(4):
        ask(app, f"listed-{number}")
    names = [card.id for card in app.client().models.list()]
    assert {"base", *(f"listed-{number}" for number in range(4))} <= set(names)
    assert len(set(names)) == len(names)


class Load:
    """Completions from several threads; counts how they end."""

    def __init__(self, app: App, *, adapters: int = 8, tokens: int = 3) -> None:
        self.failures: list[str] = []
        self.done = 0
        self._app, self._adapters, self._tokens = app, adapters, tokens
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(6)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        done = self.done
        wait_for(lambda: self.done >= done + more)

    def _ask(self, number: int) -> None:
        while not self._ended.wait(0.05):  # a steady load leaves Ray some of two cores
            number += 1
            try:
                status, _ = ask(self._app, f"load-{number % self._adapters}", self._tokens)
            except Exception as error:
                status = repr(error)
            if status == 200:
                self.done += 1
            else:
                self.failures.append(str(status))


def killed_replica(app: App) -> None:
    os.kill(next(iter(app.replicas().values())), signal.SIGKILL)


def killed_server(app: App) -> None:
    pid = next(iter(app.replicas().values()))
    keeper = next(it for it in psutil.Process(pid).children() if "lora_plugins.ray.keeper" in it.cmdline())
    keeper.children()[0].kill()


@pytest.mark.parametrize("kill", [killed_replica, pytest.param(killed_server, marks=pytest.mark.nightly)])
def test_death_under_load_loses_only_what_streamed(start: Start, kill: Callable[[App], None]) -> None:
    app = start(2, places=12, load_s=0.3)
    before = app.replicas()
    with ThreadPoolExecutor() as pool, Load(app) as load:
        load.wait_for(20)
        begun: list[openai.Stream[Completion]] = []
        while len(begun) < 2 or len({stream.response.headers[REPLICA_HEADER] for stream in begun}) < 2:
            name = f"long-{len(begun)}"
            begun.append(app.client().completions.create(model=name, prompt="x", max_tokens=400, stream=True))
        streams = [iter(stream) for stream in begun]
        assert all(next(stream).choices[0].text == "0 " for stream in streams)
        outcomes = [pool.submit(_finish, stream) for stream in streams]
        kill(app)
        load.wait_for(40)
        gone = set(before) - set(app.replicas())
        wait_for(lambda: len(app.replicas()) == 2 and not set(app.replicas()) >= set(before))
        said = [outcome.result() for outcome in outcomes]
    assert load.failures == []
    # Those of the dead replica end with an error, and no other does.
    assert said.count("lost") >= 1
    assert set(said) <= {"lost", "whole"}
    assert gone or set(app.replicas()) != set(before)


def _has(app: App, replicas: int) -> bool:
    return len(app.replicas()) == replicas


def _finish(stream: object) -> str:
    try:
        for _ in stream:
            pass
    except openai.APIError as error:
        return "lost" if "L009" in str(error) else repr(error)
    return "whole"


@pytest.mark.nightly
def test_killed_replica_takes_its_server_along(start: Start) -> None:
    app = start(2, places=12)
    pid = next(iter(app.replicas().values()))
    below = psutil.Process(pid).children(recursive=True)
    assert any("testbed.stand_in" in process.cmdline() for process in below)
    os.kill(pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []


@pytest.mark.nightly
def test_scaling_under_load_loses_nothing(start: Start) -> None:
    app = start(1, places=12)
    (first,) = app.replicas()
    with Load(app) as load:
        for replicas in (3, 1, 2):
            start(replicas, journal=app.journal, places=12)
            load.wait_for(30)
            wait_for(functools.partial(_has, app, replicas))
            if replicas == 3:
                assert first in app.replicas()
    assert load.failures == []


@pytest.mark.nightly
def test_hot_adapter_spreads_over_replicas(start: Start) -> None:
    app = start(2, places=12, chunk_s=0.2)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ask(app, "hot", 10), range(12)))
    assert {status for status, _ in answers} == {200}
    assert len({replica for _, replica in answers}) == 2


@pytest.mark.nightly
def test_servers_end_with_the_application(start: Start) -> None:
    from ray import serve

    app = start(1)
    below = psutil.Process(next(iter(app.replicas().values()))).children(recursive=True)
    serve.delete("lora-plugins")
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []
