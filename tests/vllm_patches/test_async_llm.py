"""vLLM's engine client with ours around it: whom a question reaches, and which error a client gets."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine.exceptions import EngineDeadError

from lora_plugins.errors import IncompatibleAdapter, LoRAPluginsError, NoFreeSlot
from lora_plugins.events import Events, RequestRefused, RequestServed
from lora_plugins.process import Process
from lora_plugins.server import response_start
from lora_plugins.server.planner_client import Place
from lora_plugins.server.response_start import Pending
from lora_plugins.vllm_patches import async_llm
from lora_plugins.vllm_patches.async_llm import AddLora, adding
from lora_plugins.vllm_patches.request_errors import error_tensor, stop_reason
from tests.virtual_time import runs

FREE = NoFreeSlot("all slots are pinned", adapter="sql")


class Core:
    """vLLM's client of one or several engines."""

    def __init__(self, engines: list[bytes] | None, answer: Any) -> None:
        if engines is not None:
            self.core_engines = engines
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []
        self.most_at_once = self._at_once = 0

    async def call_utility_async(self, *asked: Any) -> Any:
        self.asked.append(asked)
        await asyncio.sleep(1)
        return self.answer

    async def _call_utility_async(self, *asked: Any, engine: bytes) -> Any:
        self._at_once += 1
        self.most_at_once = max(self._at_once, self.most_at_once)
        await asyncio.sleep(1)
        self._at_once -= 1
        self.asked.append((*asked, engine))
        return f"of {engine!r}"


class Client:
    """As `AsyncLLM`, with what is wrapped; `own` are the calls that reach vLLM's methods."""

    def __init__(
        self, engines: list[bytes] | None = None, *, lora: object | None = "on", answer: Any = None, **outputs: Any
    ) -> None:
        self.engine_core = Core(engines, answer or {"load_s": 0.1, "size_bytes": 1})
        self.vllm_config = SimpleNamespace(lora_config=lora)
        self.errored, self.dead_error = False, EngineDeadError()
        self.own: list[Any] = []
        self.outputs = outputs

    async def _add_lora(self, lora_request: Any) -> bool:
        self.own.append(lora_request)
        return True

    async def _generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
        for output in self.outputs["generate"]:
            yield output

    async def _encode(
        self, prompt: Any, params: Any, request_id: str, lora_request: Any = None, *more: Any
    ) -> AsyncIterator[Any]:
        for output in self.outputs["encode"]:
            yield output

    add_lora = async_llm._adding(_add_lora)
    generate = async_llm._generating(_generate)
    encode = async_llm._encoding(_encode)


def request(name: str = "sql", *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=1, lora_path="/store/aa", load_inplace=load_inplace)


@pytest.fixture
def told(process: Process) -> list[Any]:
    told: list[Any] = []
    process.events = Events(told.append)
    return told


@pytest.fixture
def response() -> Iterator[Pending]:
    pending = Pending()
    token = response_start._pending.set(pending)
    yield pending
    response_start._pending.reset(token)


# --- whom a question reaches ---


@pytest.mark.parametrize(("engines", "number"), [(None, 0), ([], 0), ([(3).to_bytes(2, "little")], 3)])
@runs
async def test_one_engine_is_asked_as_vllm_asks_it(engines: list[bytes] | None, number: int) -> None:
    client = Client(engines, answer="answer")
    assert await async_llm._asking(weakref.ref(client))("utility", (1, "two")) == {number: "answer"}
    assert client.engine_core.asked == [("utility", 1, "two")]


@runs
async def test_of_several_engines_all_are_asked_at_once() -> None:
    engines = [number.to_bytes(2, "little") for number in (2, 0, 1)]
    client = Client(engines)
    answers = await async_llm._asking(weakref.ref(client))("utility", (1,))
    assert answers == {number: f"of {engine!r}" for number, engine in zip((2, 0, 1), engines, strict=True)}
    assert client.engine_core.most_at_once == 3


@pytest.mark.parametrize("engines", [None, [b"\0\0", b"\1\0"]])
@runs
async def test_who_asked_an_engine_that_dies_is_told(engines: list[bytes] | None) -> None:
    client, never = Client(engines), asyncio.Event()

    async def wait(*_: Any, **__: Any) -> None:
        await never.wait()

    client.engine_core.call_utility_async = client.engine_core._call_utility_async = wait
    asking = asyncio.create_task(async_llm.planner_of(client).places())
    await asyncio.sleep(100)
    assert not asking.done(), "an engine may take its time"
    client.errored = True
    await asyncio.sleep(5)
    assert asking.done(), "it waits for ever"
    with pytest.raises(EngineDeadError):
        await asking


@runs
async def test_without_lora_nothing_is_there_and_nothing_loads() -> None:
    client = Client(lora=None)
    planner = async_llm.planner_of(client)
    assert (await planner.places())(1) == Place()
    assert await planner.figures() == {}
    with pytest.raises(IncompatibleAdapter, match="restart the server with --enable-lora"):
        await planner.load(request())
    assert client.engine_core.asked == [], "an engine without LoRA has no planner"


@runs
async def test_a_client_that_is_gone_is_neither_asked_nor_kept() -> None:
    client = Client()
    planner, reference = async_llm.planner_of(client), weakref.ref(client)
    del client
    gc.collect()
    assert reference() is None, "its planner keeps it alive"
    with pytest.raises(RuntimeError, match="gone"):
        await planner.unpin(1)


def test_each_client_has_planners_of_its_own() -> None:
    one, other = Client(), Client()
    assert async_llm.planner_of(one) is async_llm.planner_of(one)
    assert async_llm.planner_of(one) is not async_llm.planner_of(other)


def test_without_lora_or_an_engine_there_are_no_planners() -> None:
    assert async_llm.has_planner(Client())
    assert not async_llm.has_planner(Client(lora=None))
    assert not async_llm.has_planner(None)


# --- loads ---


@runs
async def test_a_load_goes_to_the_planner_and_is_waited_for() -> None:
    client = Client()
    assert await client.add_lora(request()) is True
    ((utility, spec, *how),) = client.engine_core.asked
    assert (utility, spec["name"], spec["path"]) == ("lora_plugins_load", "sql", "/store/aa")
    assert how == [False], "answered as soon as it is in host memory; its request asks for the slot"
    assert asyncio.get_running_loop().time() == 1
    assert client.own == []


@runs
async def test_without_lora_a_load_is_vllms_own() -> None:
    client, asked = Client(lora=None), request(load_inplace=True)
    assert await client.add_lora(asked) is True
    assert client.own == [asked]


@pytest.mark.parametrize(
    ("error", "status"), [(FREE, 503), (IncompatibleAdapter("rank 99", adapter="sql"), 400)], ids=["L001", "L003"]
)
@runs
async def test_a_load_that_fails_is_our_text_and_status(error: LoRAPluginsError, status: int) -> None:
    client = Client(answer={"error": error.plain()})
    with adding(AddLora()) as call, pytest.raises(Exception, match=error.code) as caught:
        await client.add_lora(request())
    assert getattr(caught.value, "status_code", 400) == status
    assert str(call.error) == str(error), "for the patch above, as vLLM keeps the text only"
    if status == 503:
        assert caught.value.headers == {"Retry-After": "1"}


@runs
async def test_a_resolver_does_not_wait_for_the_load() -> None:
    client, failed = Client(), []
    with adding(AddLora(on_failure=failed.append)):
        assert await client.add_lora(request()) is True
    assert client.engine_core.asked == []
    await asyncio.sleep(2)
    assert [asked[0] for asked in client.engine_core.asked] == ["lora_plugins_load"]
    assert failed == []


@runs
async def test_a_failed_background_load_is_reported() -> None:
    client, failed, asked = Client(answer={"error": FREE.plain()}), [], request()
    with adding(AddLora(on_failure=failed.append)):
        assert await client.add_lora(asked) is True
    await asyncio.sleep(2)
    assert failed == [asked]


@pytest.mark.parametrize("is_swap", [True, False])
@runs
async def test_a_load_in_place_swaps_a_served_adapter(is_swap: bool) -> None:
    client, swapped, asked = Client(), [], request(load_inplace=True)

    async def swap(lora_request: Any) -> bool:
        swapped.append(lora_request)
        return is_swap

    with adding(AddLora(swap=swap)):
        assert await client.add_lora(asked) is True
    assert swapped == [asked]
    assert (client.engine_core.asked == []) is is_swap
    assert client.own == []


@runs
async def test_a_load_in_place_from_elsewhere_is_vllms_own() -> None:
    client, asked = Client(), request(load_inplace=True)
    await client.add_lora(asked)
    assert client.own == [asked]


@runs
async def test_a_swap_that_fails_is_our_text() -> None:
    async def swap(lora_request: Any) -> bool:
        raise FREE

    with adding(AddLora(swap=swap)), pytest.raises(Exception, match="L001"):
        await Client().add_lora(request(load_inplace=True))


# --- outputs ---


def output(reason: str | None = None, stop: str | None = None) -> Any:
    one = SimpleNamespace(finish_reason=reason, stop_reason=stop)
    return SimpleNamespace(finished=reason is not None, outputs=[one])


async def generated(client: Client, lora_request: Any) -> list[Any]:
    return [one async for one in client.generate("prompt", None, "r", lora_request=lora_request)]


@runs
async def test_the_first_output_is_told_once(told: list[Any], response: Pending) -> None:
    outputs = [output(), output(), output("stop", "a stop string")]
    client = Client(generate=outputs)
    asked = request()
    stream = client.generate("prompt", None, "r", lora_request=asked)
    assert await anext(stream) is outputs[0]
    assert (response.has_begun, response.error) == (True, None)
    assert [one async for one in stream] == outputs[1:]
    assert told == [RequestServed("sql")]
    assert asked.lora_int_id in async_llm.planner_of(client).used_at


@pytest.mark.parametrize("before", [[], [output()]], ids=["at once", "later"])
@runs
async def test_a_refused_request_raises_its_own_error(before: list[Any], told: list[Any], response: Pending) -> None:
    client = Client(generate=[*before, output("error", stop_reason(FREE))])
    with pytest.raises(Exception, match=r"L001.*all slots are pinned") as caught:
        await generated(client, request())
    assert caught.value.status_code == 503
    assert response.error is caught.value
    assert response.has_begun is bool(before)
    (refused,) = [event for event in told if isinstance(event, RequestRefused)]
    assert (refused.name, str(refused.error)) == ("sql", str(FREE))


@runs
async def test_other_errors_are_left_to_vllm(told: list[Any]) -> None:
    outputs = [output("error", None), output("abort", "lora"), output("length", "1")]
    assert await generated(Client(generate=outputs), request()) == outputs


@runs
async def test_without_an_adapter_outputs_are_vllms_own(told: list[Any], response: Pending) -> None:
    outputs = [output("error", stop_reason(FREE))]
    assert await generated(Client(generate=outputs), None) == outputs
    assert (told, response) == ([], response)
    assert not response.has_begun


def pooled(data: torch.Tensor) -> Any:
    return SimpleNamespace(finished=True, outputs=SimpleNamespace(data=data))


@runs
async def test_a_pooling_request_is_answered_or_raises_its_error(told: list[Any]) -> None:
    right = pooled(torch.tensor([0.5, 0.25]))
    client = Client(encode=[right])
    assert [one async for one in client.encode("prompt", None, "r", request())] == [right]
    with pytest.raises(Exception, match="L001"):
        async for _ in Client(encode=[pooled(error_tensor(FREE))]).encode("prompt", None, "r", lora_request=request()):
            pass
    assert [type(event) for event in told] == [RequestServed, RequestRefused]
