"""The doors as far as they can be tried without an engine: whom an RPC reaches, and which text a client gets."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from lora_plugins.errors import IncompatibleAdapter, NoFreeSlot
from lora_plugins.server import doors


class Core:
    """vLLM's client of one or several engines, each with two workers."""

    def __init__(self, engines: list[bytes] | None) -> None:
        if engines is not None:
            self.core_engines = engines
        self.asked: list[tuple[Any, ...]] = []
        self.at_once = 0
        self.most_at_once = 0

    async def _call_utility_async(self, name: str, *args: Any, engine: bytes) -> list[str]:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        self.asked.append((name, *args, engine))
        return [f"{engine.decode()}-{worker}" for worker in range(2)]


class Client:
    def __init__(self, engines: list[bytes] | None = None, max_loras: int = 3) -> None:
        self.engine_core = Core(engines)
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_loras=max_loras))
        self.asked: list[tuple[Any, ...]] = []

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[str]:
        self.asked.append((method, timeout, args))
        return ["only-0", "only-1"]


@pytest.mark.parametrize("engines", [None, [], [b"a"]])
def test_one_engine_is_asked_as_vllm_asks_it(engines: list[bytes] | None) -> None:
    client = Client(engines)
    answers = asyncio.run(doors._rpc_of(weakref.ref(client))("method", (1, "two")))
    assert answers == ["only-0", "only-1"]
    assert client.asked == [("method", None, (1, "two"))]
    assert client.engine_core.asked == []


def test_of_several_engines_all_are_asked_at_once_and_every_worker_answers() -> None:
    client = Client([b"a", b"b", b"c"])
    answers = asyncio.run(doors._rpc_of(weakref.ref(client))("method", (1, "two")))
    assert answers == ["a-0", "a-1", "b-0", "b-1", "c-0", "c-1"]
    assert client.engine_core.asked == [
        ("collective_rpc", "method", None, (1, "two"), None, engine) for engine in (b"a", b"b", b"c")
    ]
    assert client.engine_core.most_at_once == 3
    assert client.asked == []


def test_a_client_that_is_gone_is_not_asked_and_not_kept() -> None:
    async def run() -> tuple[Any, weakref.ref[Client]]:
        client = Client()
        return doors.gate_of(client), weakref.ref(client)

    gate, reference = asyncio.run(run())
    gc.collect()
    assert reference() is None, "its gate keeps it alive"
    assert asyncio.run(gate._staging._rpc("method", ())) == []


def test_each_client_has_one_gate_with_its_slots() -> None:
    async def run() -> None:
        one, other = Client(max_loras=3), Client(max_loras=5)
        assert doors.gate_of(one) is doors.gate_of(one)
        assert doors.gate_of(one) is not doors.gate_of(other)
        assert doors.gate_of(one)._turns.slots == 3
        assert doors.gate_of(other)._turns.slots == 5

    asyncio.run(run())


class Gate:
    """Lets one adapter in and refuses the other."""

    def __init__(self) -> None:
        self.inside: list[str] = []

    async def enter(self, request: Any, request_id: str, *, load: bool = False) -> str:
        if request == "bad":
            raise NoFreeSlot("all leased", adapter="bad")
        self.inside.append(request)
        return request

    def leave(self, hold: str) -> None:
        self.inside.remove(hold)


def test_a_request_holds_its_adapter_until_it_ends_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(doors, "gate_of", lambda _: gate)

    async def run() -> None:
        async with doors._held(None, "good"):
            assert gate.inside == ["good"]
        assert gate.inside == []
        with pytest.raises(ZeroDivisionError):
            async with doors._held(None, "good"):
                raise ZeroDivisionError
        assert gate.inside == []
        async with doors._held(None, None):
            assert gate.inside == [], "the base model passes"

    asyncio.run(run())


def test_a_refusal_is_our_status_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import HTTPException

    monkeypatch.setattr(doors, "gate_of", lambda _: Gate())

    async def run() -> None:
        async with doors._held(None, "bad"):
            raise AssertionError("it was let in")

    with pytest.raises(HTTPException, match=r"L001.*all leased") as caught:
        asyncio.run(run())
    assert caught.value.status_code == 503
    assert caught.value.headers == {"Retry-After": "1"}


def test_where_vllm_swallows_an_error_its_text_is_still_told() -> None:
    """vLLM turns whatever `add_lora` raises into an ErrorResponse of its own."""

    async def swallowing(self: Any, refuse: bool) -> Any:
        if refuse:
            doors._note(IncompatibleAdapter("rank 99", adapter="sql"))
        return SimpleNamespace(error="could not be loaded") if refuse else "loaded"

    explained = doors._explaining(swallowing)

    async def run() -> None:
        assert await explained(None, False) == "loaded"
        with pytest.raises(Exception, match=r"L003.*rank 99"):
            await explained(None, True)
        assert await explained(None, False) == "loaded", "nothing of it is left"

    asyncio.run(run())


def test_an_error_of_which_nothing_is_known_stays_vllms() -> None:
    response = SimpleNamespace(error="the model does not exist")

    async def unknown(self: Any) -> Any:
        return response

    async def run() -> None:
        assert await doors._explaining(unknown)(None) is response

    asyncio.run(run())
    doors._note(IncompatibleAdapter("nobody listens"))


def test_refusals_of_two_requests_at_once_are_not_mixed_up() -> None:
    async def swallowing(self: Any, name: str) -> Any:
        await asyncio.sleep(0.01)
        doors._note(IncompatibleAdapter("rank 99", adapter=name))
        await asyncio.sleep(0.01)
        return SimpleNamespace(error="could not be loaded")

    async def run() -> list[BaseException]:
        explained = doors._explaining(swallowing)
        return await asyncio.gather(*(explained(None, name) for name in ("x", "y", "z")), return_exceptions=True)

    errors = asyncio.run(run())
    assert [f"'{name}'" in str(error) for name, error in zip("xyz", errors, strict=True)] == [True] * 3
