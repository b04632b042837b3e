"""Chats of versions: read by reading processes alone, and kept with the versions."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.adapter import chat as chat_module
from lora_plugins.adapter.chat import AddedToken, Chat
from lora_plugins.errors import AdapterNotFound, SourceUnavailable
from lora_plugins.settings import AdapterChat
from lora_plugins.store.disk_errors import DamagedCopy
from lora_plugins.verification.children import Children
from tests.make import BASE, CHAT, adapter_files
from tests.resolvers.fakes import FakeSource

FILES = adapter_files() | CHAT
UNREAD = ("chat_template.json (of a processor)", "processor_config.json (of a processor)")
TEMPLATES = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
READ = Chat(TEMPLATES, {"eos_token": "</s>"}, (2,), (AddedToken(3, "<a>"),), unused=UNREAD)


@pytest.fixture(autouse=True)
def opens_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which is the API server's; reading processes do not inherit the change."""

    def refuse(path: Path) -> Any:
        raise AssertionError(f"{path} is read in the API server's process")

    monkeypatch.setattr(chat_module, "open_regular", refuse)


def test_a_chat_comes_with_the_verification_of_its_version(make, readings):
    resolver = make(FakeSource("s3", {"sql": FILES}))
    found = resolver.ask()
    verified = len(readings.asked)
    assert resolver.chats.at(str(found.path)) == READ
    assert asyncio.run(resolver.chats.read(str(found.path))) == READ
    assert len(readings.asked) == verified, "a look-up"


def test_a_restored_version_brings_its_chat(make, readings):
    before = make(FakeSource("s3", {"sql": FILES}))
    version = before.ask()
    after = make(FakeSource("s3"))
    asyncio.run(after.restored("sql", None, version.digest, before.place_of(version)))
    verified = len(readings.asked)
    assert after.chats.at(str(version.path)) == READ
    assert len(readings.asked) == verified


def test_another_api_server_asks_a_reading_process_once(make, readings):
    """A follower knows the path alone; many requests come at once."""
    path = str(make(FakeSource("s3", {"sql": FILES})).ask().path)
    other, verified = make(FakeSource("s3")), len(readings.asked)

    async def read() -> list[Chat]:
        return await asyncio.gather(*(other.chats.read(path) for _ in range(20)))

    assert asyncio.run(read()) == [READ] * 20
    assert other.chats.at(path) == READ
    assert len(readings.asked) == verified + 1


def test_a_missing_copy_brings_no_other_chat(make):
    path = make(FakeSource("s3", {"sql": FILES})).ask().path
    shutil.rmtree(path)
    with pytest.raises(DamagedCopy):
        asyncio.run(make(FakeSource("s3")).chats.read(str(path)))


@pytest.mark.parametrize("loss", ["removed", "denied"])
def test_the_leader_has_the_chat_of_a_lost_copy(make, monkeypatch, loss):
    leader = make(FakeSource("s3", {"sql": FILES}))
    path, follower = leader.ask().path, make(FakeSource("s3"))
    if loss == "removed":
        shutil.rmtree(path)
    else:
        monkeypatch.setattr(Children, "read", lambda *_, **__: refused(SourceUnavailable("a stale handle")))
    follower.chats.of_leader = leader.chats.read

    async def asked() -> tuple[Chat, Chat]:
        return await follower.chats.read(str(path)), follower.chats.at(str(path))

    assert asyncio.run(asked()) == (READ, READ)


@pytest.mark.parametrize("error", [SourceUnavailable("a stale handle"), AdapterNotFound("nothing")])
def test_a_chat_that_nobody_has_is_the_first_error(make, monkeypatch, error):
    path, follower = make(FakeSource("s3", {"sql": FILES})).ask().path, make(FakeSource("s3"))
    monkeypatch.setattr(Children, "read", lambda *_, **__: refused(error))

    async def of_leader(path: str) -> Chat:
        raise SourceUnavailable(f"the first API server lacks {path}")

    follower.chats.of_leader = of_leader
    with pytest.raises(SourceUnavailable, match=r"stale handle|damaged copy") as raised:
        asyncio.run(follower.chats.read(str(path)))
    assert isinstance(raised.value, DamagedCopy) == isinstance(error, AdapterNotFound)


def refused(error: Exception) -> Future[Any]:
    """As a reading process answers."""
    answer: Future[Any] = Future()
    answer.set_exception(error)
    return answer


def test_chats_of_the_base_model_ask_no_process(make, readings):
    path = str(make(FakeSource("s3", {"sql": FILES})).ask().path)
    other, verified = make(FakeSource("s3"), adapter_chat=AdapterChat.BASE), len(readings.asked)
    assert other.chats.at(path) == asyncio.run(other.chats.read(path)) == Chat()
    assert len(readings.asked) == verified


def test_tokens_are_compared_with_the_engines_once_it_is_known(make):
    """A program with `LLM` verifies an adapter before the tokenizer is known."""
    resolver = make(FakeSource("s3", {"sql": FILES}))
    path = str(resolver.ask().path)
    assert resolver.chats.at(path).added_tokens
    resolver.chats.served = lambda chat: Chat(chat.templates)
    assert resolver.chats.at(path) == Chat(READ.templates)
    assert asyncio.run(resolver.chats.read(path)) == Chat(READ.templates)


def test_tokens_are_compared_once_and_not_on_the_event_loop(make):
    resolver = make(FakeSource("s3", {"sql": FILES}))
    path, threads = str(resolver.ask().path), []

    def served(chat: Chat) -> Chat:
        threads.append(threading.current_thread())
        return chat

    resolver.chats.served = served

    async def requests() -> None:
        for _ in range(3):
            assert await resolver.chats.read(path) == resolver.chats.at(path) == READ

    asyncio.run(requests())
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_memory_of_chats_is_bounded(make, readings, monkeypatch):
    monkeypatch.setattr("lora_plugins.resolvers.chats._MOST_BYTES", 1000)
    files = {str(n): FILES | {"chat_template.jinja": str(n).encode() * 300} for n in range(4)}
    resolver = make(FakeSource("s3", files))
    paths = [str(asyncio.run(resolver.resolve(name, BASE.path)).path) for name in files]
    verified = len(readings.asked)
    assert [resolver.chats.at(path).templates["default"] for path in paths] == [str(n) * 300 for n in range(4)]
    assert len(readings.asked) > verified
    assert resolver.chats._kept.currsize <= 1000
