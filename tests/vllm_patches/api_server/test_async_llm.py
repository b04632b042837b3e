"""vLLM's engine client with ours around it: whom a question reaches, and which error a client gets."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, LoRAPluginsError, NoFreeSlot
from lora_plugins.events import Events, NotServed, RequestServed
from lora_plugins.lifecycle.response import Response
from lora_plugins.process import Process
from lora_plugins.scheduler.messages import AdapterState
from lora_plugins.settings import Settings
from lora_plugins.verification.children import Children
from lora_plugins.vllm_patches.api_server import async_llm
from lora_plugins.vllm_patches.message_fields import error_tensor, stop_reason
from lora_plugins.vllm_patches.wrapping import around
from tests.make import CHAT, adapter_files, put
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
        self.vllm_config = SimpleNamespace(lora_config=lora, model_config=SimpleNamespace(model="/base"))
        self.errored, self.dead_error = False, EngineDeadError()
        self.own: list[Any] = []
        self.outputs = outputs

    async def _add_lora(self, lora_request: Any) -> bool:
        self.own.append(lora_request)
        return True

    async def _remove_lora(self, lora_id: int) -> bool:
        return True

    async def _generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        self.own.append(lora_request)
        for output in self.outputs["generate"]:
            yield output

    async def _encode(
        self, prompt: Any, params: Any, request_id: str, lora_request: Any = None, *more: Any
    ) -> AsyncIterator[Any]:
        self.own.append(lora_request)
        for output in self.outputs["encode"]:
            yield output

    add_lora = around(_add_lora, async_llm._add_lora, only=async_llm.has_planner)
    remove_lora = around(_remove_lora, async_llm.remove_lora)
    generate = around(_generate, async_llm._answer)
    encode = around(_encode, async_llm._answer)


def request(name: str = "sql", *, load_inplace: bool = False) -> Any:
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path="/store/aa", load_inplace=load_inplace)


@pytest.fixture(autouse=True)
def has_store(process: Process, tmp_path: Path) -> None:
    process.settings = Settings(store_dir=tmp_path / "store")


@pytest.fixture
def told(process: Process) -> list[Any]:
    told: list[Any] = []
    process.events = Events(told.append)
    return told


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
    asking = asyncio.create_task(async_llm.planner_of(client).states())
    await asyncio.sleep(100)
    assert not asking.done(), "an engine may take its time"
    client.errored = True
    await asyncio.sleep(5)
    assert asking.done(), "it waits for ever"
    with pytest.raises(EngineDeadError):
        await asking


@runs
async def test_who_leaves_an_engine_s_answer_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.engine_core.call_utility_async = lambda *_: asyncio.Event().wait()
    asking = asyncio.create_task(async_llm.planner_of(client).states())
    await asyncio.sleep(1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(1)
    del asking
    gc.collect()
    assert "never retrieved" not in caplog.text


@runs
async def test_without_lora_nothing_is_there_and_nothing_loads() -> None:
    client = Client(lora=None)
    planner = async_llm.planner_of(client)
    assert (await planner.states())(1) == AdapterState(1, "")
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


def test_each_client_with_lora_has_a_planner_of_its_own() -> None:
    one, other = Client(), Client()
    assert async_llm.planner_of(one) is async_llm.planner_of(one)
    assert async_llm.planner_of(one) is not async_llm.planner_of(other)
    # The last is a framework's client, which has no configuration.
    assert [async_llm.has_planner(it) for it in (one, Client(lora=None), None, object())] == [True, False, False, False]


# --- loads ---


@runs
async def test_a_load_goes_to_the_planner_and_is_waited_for() -> None:
    client = Client()
    assert await client.add_lora(request()) is True
    ((utility, spec, *how),) = client.engine_core.asked
    assert (utility, spec["name"], spec["path"]) == ("lora_plugins_load", "sql", "/store/aa")
    assert how == [False, None], "answered as soon as it is in host memory; its request asks for the slot"
    assert asyncio.get_running_loop().time() == 1
    assert client.own == []


@pytest.mark.parametrize("lora", [None, "on"], ids=["without LoRA", "in place from elsewhere"])
@runs
async def test_a_load_that_is_not_planned_is_vllms_own(lora: object | None) -> None:
    client, asked = Client(lora=lora), request(load_inplace=True)
    assert await client.add_lora(asked) is True
    assert client.own == [asked]


@pytest.mark.parametrize(
    ("error", "status"), [(FREE, 503), (IncompatibleAdapter("rank 99", adapter="sql"), 400)], ids=["L001", "L003"]
)
@runs
async def test_a_load_that_fails_is_our_text_and_status(error: LoRAPluginsError, status: int) -> None:
    client = Client(answer={"error": error.plain()})
    with pytest.raises(Exception, match=error.code) as caught:
        await client.add_lora(request())
    assert getattr(caught.value, "status_code", 400) == status
    if status == 503:
        assert caught.value.headers == {"Retry-After": "1"}


# --- what a version brings for chats ---


def test_the_chat_is_known_before_vllms_own_steps(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `InputProcessor` cannot await, and the event loop must not wait for a reading process."""
    chats = process.resolver.chats
    path = str(put(process.resolver.store.layout.adapter("a1" * 32), adapter_files() | CHAT))

    def outputs() -> Iterator[Any]:
        monkeypatch.delattr(Children, "read")
        assert chats.at(path).templates["default"] == "{{ messages }}"
        yield output()

    async def ask() -> None:
        client = Client(generate=outputs())
        assert [it async for it in client.generate("prompt", None, "r", lora_request=LoRARequest("sql", 1, path))]

    asyncio.run(ask())


# --- what lies at a path ---


@pytest.fixture
def adapter(tmp_path: Path) -> LoRARequest:
    put(tmp_path / "sql", adapter_files())
    return LoRARequest("sql", 7, str(tmp_path / "sql"))


@pytest.mark.parametrize("way", ["generate", "encode"])
def test_the_engine_gets_the_path_of_a_copy(adapter: LoRARequest, process: Process, way: str) -> None:
    client = Client(generate=[output()], encode=[pooled(torch.zeros(2))])

    async def ask(request: Any) -> str:
        async for _ in getattr(client, way)("prompt", None, "r", lora_request=request):
            pass
        return str(client.own[-1].lora_path)

    async def ask_all() -> None:
        first = await ask(adapter)
        put(Path(adapter.lora_path), adapter_files(lora_alpha=9))
        assert process.resolver.store.layout.digest_of(first) is not None
        assert await ask(adapter) == first
        assert await ask(LoRARequest("sql", 7, "/dummy_lora_path")) == first
        again = LoRARequest("sql", 7, adapter.lora_path, load_inplace=True)
        second = await ask(again)
        assert second != first
        assert (again.lora_path, again.load_inplace) == (adapter.lora_path, True), "the caller's own object"
        assert await ask(adapter) == second
        (Path(adapter.lora_path) / CONFIG_FILE).write_text("{")
        with pytest.raises(Exception, match="L005"):
            await ask(again)

    asyncio.run(ask_all())


def test_a_load_by_path_is_a_load_of_its_copy(adapter: LoRARequest, process: Process) -> None:
    client = Client()
    client.engine_core.call_utility_async = answering_at_once(client.engine_core)

    async def load() -> list[str]:
        assert await client.add_lora(adapter) is True
        put(Path(adapter.lora_path), adapter_files(lora_alpha=9))
        assert await client.add_lora(adapter) is True
        assert await client.remove_lora(7) is True
        return [spec["path"] for _, spec, *_ in client.engine_core.asked]

    one, other = asyncio.run(load())
    assert one != other
    assert all(process.resolver.store.layout.digest_of(path) for path in (one, other))
    held = [process.resolver.store.leases.holders(Path(path).name) for path in (one, other)]
    assert not any(held), "what was removed is not leased"
    assert client.engine_core.asked[0][1]["uri"] == adapter.lora_path
    assert client.own == []


def test_a_path_below_no_directory_is_loaded_as_any() -> None:
    """No id that an engine holds: the answer waits for the engine."""
    client = Client()
    client.engine_core.call_utility_async = answering_at_once(client.engine_core)
    asyncio.run(client.add_lora(LoRARequest("sql", 7, "/dev/null/sql")))
    assert [spec["path"] for _, spec, *_ in client.engine_core.asked] == ["/dev/null/sql"]


def answering_at_once(core: Core) -> Any:
    async def call(*asked: Any) -> Any:
        core.asked.append(asked)
        return core.answer

    return call


# --- outputs ---


def output(reason: str | None = None, stop: str | None = None) -> Any:
    one = SimpleNamespace(finish_reason=reason, stop_reason=stop)
    return SimpleNamespace(finished=reason is not None, outputs=[one])


async def generated(client: Client, lora_request: Any) -> list[Any]:
    return [one async for one in client.generate("prompt", None, "r", lora_request=lora_request)]


@runs
async def test_the_first_output_is_told_once(told: list[Any], response: Response) -> None:
    outputs = [output(), output(), output("stop", "a stop string")]
    client = Client(generate=outputs)
    asked = request()
    stream = client.generate("prompt", None, "r", lora_request=asked)
    assert await anext(stream) is outputs[0]
    assert (response.has_begun, response.error) == (True, None)
    assert [one async for one in stream] == outputs[1:]
    assert told == [RequestServed("sql")]
    assert asked.lora_int_id in async_llm.planner_of(client).used_at


@runs
async def test_a_response_knows_what_made_its_prompts(told: list[Any], response: Response) -> None:
    old, new = "a1" * 32, "b2" * 32
    for spans in (None, [[new, 0]], [[old, 0], [new, 2]]):
        said = None if spans is None else {"lora_versions": spans}
        client = Client(generate=[SimpleNamespace(kv_transfer_params=said, **vars(output("stop")))])
        await generated(client, LoRARequest("sql", 7, f"/store/{old}"))
    assert response.spans == [(old, 0), (new, 0), (new, 2)]


@pytest.mark.parametrize("before", [[], [output()]], ids=["at once", "later"])
@runs
async def test_a_refused_request_raises_its_own_error(before: list[Any], told: list[Any], response: Response) -> None:
    client = Client(generate=[*before, output("error", stop_reason(FREE))])
    with pytest.raises(Exception, match=r"L001.*all slots are pinned") as caught:
        await generated(client, request())
    assert caught.value.status_code == 503
    assert response.error is caught.value
    assert response.has_begun is bool(before)
    (refused,) = [event for event in told if isinstance(event, NotServed)]
    assert (refused.name, str(refused.error)) == ("sql", str(FREE))


@runs
async def test_other_errors_and_other_requests_are_left_to_vllm(told: list[Any], response: Response) -> None:
    outputs = [output("error", None), output("abort", "lora"), output("length", "1")]
    assert await generated(Client(generate=outputs), request()) == outputs
    told.clear()
    outputs = [output("error", stop_reason(FREE))]
    assert await generated(Client(generate=outputs), None) == outputs, "of no adapter"
    assert told == []


class MendedCopies:
    """Each request is given its name's present version; what an engine could not read is another one then."""

    def __init__(self, faults: int = 0, error: LoRAPluginsError | None = None) -> None:
        self.faults = faults
        self.error = error
        self.held: list[Any] = []
        self.given: list[str] = []

    @asynccontextmanager
    async def using(self, lora_request: Any, share: object = None) -> AsyncIterator[Any]:
        if self.error is not None:
            raise self.error
        taken = LoRARequest(lora_request.lora_name, 10 + len(self.given), f"/store/{len(self.given)}")
        self.given.append(taken.lora_path)
        self.held.append(taken)
        try:
            yield taken
        finally:
            self.held.remove(taken)

    async def after_failure(self, lora_request: Any, error: LoRAPluginsError) -> Any:
        assert lora_request.lora_path == self.given[-1]
        self.faults -= 1
        return lora_request if self.faults >= 0 else None


class Refusing(Client):
    """One whose engine refuses the first requests; `copies` says which version each has, and what is held meanwhile."""

    def __init__(self, copies: Any, refusals: int, before: int = 0) -> None:
        super().__init__()
        self.copies = self.lora_plugins_copies = copies
        self.refusals, self.before = refusals, before

    async def _generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        assert [one.lora_path for one in self.copies.held] == [lora_request.lora_path]
        self.own.append(lora_request.lora_path)
        for _ in range(self.before):
            yield output()
        yield output("error", stop_reason(UNREADABLE)) if len(self.own) <= self.refusals else output("stop")

    generate = around(_generate, async_llm._answer)


UNREADABLE = InvalidAdapter("a header that cannot be read", adapter="sql")


@runs
async def test_a_request_goes_on_with_the_good_copy(told: list[Any]) -> None:
    client = Refusing(MendedCopies(faults=1), refusals=1)
    assert len(await generated(client, request())) == 1
    assert (client.own, client.copies.held) == (["/store/0", "/store/1"], [])
    assert [type(event) for event in told] == [RequestServed]


@pytest.mark.parametrize(("faults", "refusals", "before", "asked"), [(0, 1, 0, 1), (9, 9, 0, 2), (9, 9, 1, 1)])
@runs
async def test_what_cannot_be_mended_is_its_own_error(
    told: list[Any], faults: int, refusals: int, before: int, asked: int
) -> None:
    """The bytes are at fault; the fresh ones too; or an answer has begun."""
    client = Refusing(MendedCopies(faults), refusals, before)
    with pytest.raises(Exception, match=r"L005.*a header that cannot be read"):
        await generated(client, request())
    assert (len(client.own), client.copies.held) == (asked, [])
    assert sum(isinstance(event, NotServed) for event in told) == 1


@runs
async def test_a_copy_that_cannot_be_had_reaches_no_engine(told: list[Any], response: Response) -> None:
    client = Refusing(MendedCopies(error=FREE), refusals=0)
    with pytest.raises(Exception, match="L001") as caught:
        await generated(client, request())
    assert (response.error, client.own) == (caught.value, [])
    assert [type(event) for event in told] == [NotServed]


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
    assert [type(event) for event in told] == [RequestServed, NotServed]
