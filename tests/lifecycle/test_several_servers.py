"""One API server leads, others follow, over a real socket: what is served, in which order, and what breaks off."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router

from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, RateExceeded, SourceUnavailable
from lora_plugins.lifecycle import leader as frames
from lora_plugins.lifecycle import leader as leading
from lora_plugins.lifecycle.carrying import CarryToLeader, answer_carried
from lora_plugins.lifecycle.follower import FollowedTable, Follower, has_started
from lora_plugins.lifecycle.leader import Frame, Leader
from lora_plugins.lifecycle.principal_limits import FollowedRates, Rate, Rates, Share, Shares

NAMES = ["sql", "chat", "team/poet"]


@dataclass(frozen=True)
class Request:
    """In the place of vLLM's: what a name stands for."""

    name: str
    number: int


class Servers:
    """A leader with an application, and the followers that have joined."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gone: list[int] = []
        self.leader = Leader(
            lambda it: {"name": it.name, "number": it.number} if isinstance(it, Request) else None, self.gone.append
        )
        self.calls: list[Frame] = []
        self.changed: list[tuple[str, Any]] = []
        self.aborted: list[str] = []
        self.relieved = 0
        self.lost = 0
        self.shares, self.rates = Shares(4, None), Rates()
        self.app: Any = None

    async def start(self, folder: Path) -> None:
        async def carried(first: Frame, *streams: Any) -> None:
            await answer_carried(self.app, first, *streams)

        await self.leader.listen(folder, self._call, carried)

    async def _call(self, frame: Frame, held: AsyncExitStack) -> Frame:
        self.calls.append(frame)
        if frame["call"] == "use":
            await held.enter_async_context(self.shares.using(Share("team-a", 0.5), frame["name"]))
        if frame["call"] == "fail":
            raise ValueError("not for followers")
        if frame["call"] == "resolve":
            self.leader.table[frame["name"]] = Request(frame["name"], 7)
        if frame["call"] == "admit":
            return {"wait": self.rates.wait(Rate(**frame["rate"]))}
        if frame["call"] == "spend":
            self.rates.spend(Rate(**frame["rate"]), frame["tokens"])
        return {"said": frame["call"]}

    async def _relieve(self) -> None:
        await asyncio.sleep(0.05)
        self.relieved += 1
        if self.relieved == 1:
            raise OSError("a disk that answers no more")

    def _lose(self) -> None:
        self.lost += 1

    async def join(self, number: int = 1) -> Follower:
        follower = Follower(
            lambda adapter: Request(adapter["name"], adapter["number"]),
            lambda name, before: self.changed.append((name, before)),
            self.aborted.extend,
            self._relieve,
            on_loss=self._lose,
        )
        await follower.connect(self.folder, number)
        return follower


@pytest.fixture
def some(tmp_path: Path) -> Servers:
    return Servers(tmp_path)


def listening(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test, and what it asks pytest for, while the leader listens."""

    @functools.wraps(test)
    def run(some: Servers, **fixtures: Any) -> None:
        async def started() -> None:
            async with asyncio.timeout(60):
                await some.start(some.folder)
                try:
                    await test(some, **fixtures)
                finally:
                    some.leader.close()

        asyncio.run(started())

    return run


@listening
async def test_followers_have_every_change_when_it_is_answered(some: Servers) -> None:
    followers = [await some.join() for _ in range(3)]
    rng = random.Random(5)
    for number in range(300):
        name = rng.choice(NAMES)
        if name in some.leader.table and rng.random() < 0.3:
            del some.leader.table[name]
        else:
            some.leader.table[name] = Request(name, number)
        if rng.random() < 0.1:
            await some.leader.all_have()
            assert all(follower.table == dict(some.leader.table) for follower in followers)
    await some.leader.all_have()
    assert all(follower.table == dict(some.leader.table) for follower in followers)
    assert some.leader.number >= 300


@listening
async def test_a_follower_that_starts_late_is_told_everything_first(some: Servers) -> None:
    for number, name in enumerate(NAMES):
        some.leader.table[name] = Request(name, number)
    follower = await some.join()
    assert follower.table == dict(some.leader.table)
    assert list(follower.table) == NAMES, "in the same order, as they are listed"
    some.leader.say_ready()
    await follower.ready()
    await (await some.join()).ready()


@listening
async def test_followers_wait_for_a_leader_that_starts_later(some: Servers) -> None:
    later = Servers(some.folder / "later")
    (some.folder / "later").mkdir()
    joining = asyncio.create_task(later.join())
    await asyncio.sleep(0.2)
    assert not joining.done()
    await later.start(some.folder / "later")
    assert (await joining).table == {}
    later.leader.close()


@listening
async def test_what_a_call_changes_is_there_before_its_answer(some: Servers) -> None:
    follower = await some.join()
    assert (await follower.call("resolve", name="sql"))["said"] == "resolve"
    assert follower.table["sql"] == Request("sql", 7)
    assert some.changed == [("sql", None)]
    with pytest.raises(SourceUnavailable):
        await follower.call("fail")
    assert (await follower.call("again"))["said"] == "again"


@listening
async def test_places_of_followers_are_released_in_every_way(some: Servers) -> None:
    """Two places for three servers: one leaves, one goes away while it waits, one dies."""
    one, other, dying = [await some.join() for _ in range(3)]

    async def use(follower: Follower, name: str, entered: asyncio.Event, leave: asyncio.Event) -> None:
        async with follower.lasting("use", name=name):
            entered.set()
            await leave.wait()

    entered, leave = ([asyncio.Event() for _ in range(5)] for _ in range(2))
    holders = [asyncio.create_task(use(who, f"a-{number}", entered[number], leave[number]))
               for number, who in enumerate((one, dying))]  # fmt: skip
    await asyncio.gather(*(it.wait() for it in entered[:2]))
    impatient = asyncio.create_task(use(other, "a-2", entered[2], leave[2]))
    last = asyncio.create_task(use(other, "a-3", entered[3], leave[3]))
    await other.call("said", name="")
    impatient.cancel()
    await other.call("said", name="")
    assert not entered[2].is_set()
    assert not entered[3].is_set()
    leave[0].set()
    await entered[3].wait()
    final = asyncio.create_task(use(one, "a-4", entered[4], leave[4]))
    await one.call("said", name="")
    assert not entered[4].is_set()
    dying.close()
    await entered[4].wait()
    for event in leave:
        event.set()
    await asyncio.gather(*holders, impatient, last, final, return_exceptions=True)
    await one.call("said", name="")
    async with some.shares.using(Share("team-a", 0.5), "a-5"), some.shares.using(Share("team-a", 0.5), "a-6"):
        pass


@listening
async def test_a_follower_says_each_second_which_adapters_are_used(some: Servers) -> None:
    follower = await some.join()
    for engine_id in (1, 1, 2, 1):
        follower.used(engine_id)
    await follower.call("done")
    assert [frame["engine_id"] for frame in some.calls if frame["call"] == "used"] == [1, 2]


@listening
async def test_a_limit_counts_what_all_servers_admit(some: Servers) -> None:
    rate = Rate("team-a", 3, 100)

    async def refusal_of(rates: Rates) -> RateExceeded:
        with pytest.raises(RateExceeded) as refused:
            await rates.admit(rate)
        return refused.value

    joined = [await some.join(number) for number in (1, 2)]
    one, two = (FollowedRates(follower) for follower in joined)
    for rates in (one, two, some.rates):
        await rates.admit(rate)
    for rates in (one, two, some.rates):
        refused = await refusal_of(rates)
        assert ("requests" in str(refused), refused.retry_after_s) == (True, 20)
    one.spend(rate, 300)
    await joined[0].call("done")
    for rates in (two, some.rates):
        assert "tokens" in str(await refusal_of(rates))
    joined[0].close()
    one.spend(rate, 1)
    with pytest.raises(SourceUnavailable):
        await one.admit(rate)


@listening
async def test_room_is_looked_for_when_every_follower_has_ended_leases(some: Servers) -> None:
    followers = [await some.join() for _ in range(2)]
    await some.leader.relieve()
    assert some.relieved == len(followers)
    some.leader.abort(["a", "b"])
    some.leader.table["sql"] = Request("sql", 1)
    await some.leader.all_have()
    assert all(list(follower.table) == ["sql"] for follower in followers), "the one that failed follows on"
    assert some.aborted == ["a", "b"] * 2


@listening
async def test_a_follower_without_a_leader_serves_nothing(some: Servers) -> None:
    some.leader.table["sql"] = Request("sql", 1)
    follower = await some.join()
    some.leader.close()
    while follower.table:
        await asyncio.sleep(0.01)
    for asks in (follower.call("resolve", name="chat"), follower.ready()):
        with pytest.raises(SourceUnavailable):
            await asks
    with pytest.raises(SourceUnavailable):
        follower.used(1)
    assert some.lost == 1


@listening
async def test_a_follower_does_not_start_where_the_connection_breaks(some: Servers) -> None:
    (some.folder / "breaks").mkdir()
    some.folder = some.folder / "breaks"
    await asyncio.start_unix_server(lambda _, writer: writer.close(), some.folder / leading.SOCKET)
    with pytest.raises(SourceUnavailable):
        await some.join()


ENDING = """
import asyncio, sys
from lora_plugins.lifecycle import follower as follower
follower._OWN_END_S = 0.1
asyncio.run(follower.end_without_leader(lambda: sys.argv[1] == "ending"))
"""


@pytest.mark.parametrize(("state", "code", "says"), [("serving", 1, "has lost the first one"), ("ending", 0, "")])
def test_a_process_without_a_leader_ends_as_failed(state: str, code: int, says: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING, state], capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False)
    assert says in ended.stderr


@listening
async def test_a_call_ends_with_the_leader(some: Servers) -> None:
    asked = asyncio.Event()

    async def never(frame: Frame, _: AsyncExitStack) -> Frame:
        asked.set()
        return await asyncio.Future()

    some._call = never  # type: ignore[method-assign]
    (some.folder / "hangs").mkdir()
    await some.start(some.folder / "hangs")
    some.folder = some.folder / "hangs"
    follower = await some.join()
    call = asyncio.create_task(follower.call("resolve", name="sql"))
    await asked.wait()
    some.leader.close()
    with pytest.raises(SourceUnavailable):
        await call


@listening
async def test_a_follower_that_is_gone_is_not_waited_for(some: Servers) -> None:
    follower, other = await some.join(2), await some.join()
    follower.close()
    some.leader.table["sql"] = Request("sql", 1)
    await some.leader.all_have()
    assert (dict(other.table), some.lost) == ({"sql": Request("sql", 1)}, 0)
    while not some.gone:
        await asyncio.sleep(0.01)
    assert some.gone == [2]


@listening
async def test_one_that_does_not_take_a_change_up_is_named(some: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "_ALL_HAVE_S", 0.2)
    reader, writer = await asyncio.open_unix_connection(some.folder / leading.SOCKET)
    frames.send(writer, {"follows": 1})
    await frames.receive(reader)  # all, and says nothing
    some.leader.table["sql"] = Request("sql", 1)
    with pytest.raises(SourceUnavailable, match="has not taken up a change"):
        await some.leader.all_have()
    writer.close()


@listening
async def test_only_the_leader_changes_what_is_served(some: Servers) -> None:
    some.leader.table["sql"] = Request("sql", 1)
    follower = await some.join()
    with pytest.raises(LoRAPluginsError):
        follower.table["chat"] = Request("chat", 1)
    for change in (FollowedTable.clear, FollowedTable.popitem, lambda table: table.update(chat=1),
                   lambda table: table.pop("sql"), lambda table: table.setdefault("chat")):  # fmt: skip
        with pytest.raises(LoRAPluginsError):
            change(follower.table)
    with pytest.raises(InvalidAdapter, match="only this process"):
        some.leader.table["weights"] = object()
    assert list(some.leader.table) == list(follower.table) == ["sql"]


# --- requests that are carried ---


class Application:
    """Answers with what it was asked; `/v1/loras/slow` waits until its caller has left."""

    def __init__(self) -> None:
        self.leader: Leader | None = None
        self.left = asyncio.Event()
        self.has_changed: list[bool] = []
        self.followers: list[Follower] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = 0
        while (message := await receive()).get("more_body"):
            size += len(message["body"])
        size += len(message["body"])
        if scope["path"].endswith("slow"):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        if scope["path"].endswith("missing"):
            raise AdapterNotFound("no such adapter", expected="one", remedy="load it", adapter="missing")
        if self.leader is not None and scope["method"] != "GET":
            self.leader.table["sql"] = Request("sql", size)
        said = f"{scope['method']} {scope['path']}?{scope['query_string'].decode()} {size} {scope['client'][0]}"
        headers = [*scope["headers"], (b"X-Request-Id", b"of the leader")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        for part in (said.encode(), b"!"):
            await send({"type": "http.response.body", "body": part, "more_body": part != b"!"})


async def _created(_: Any) -> PlainTextResponse:
    return PlainTextResponse("made", 201)


async def asked(
    app: Any, method: str, path: str, body: list[bytes], *, leaves: bool = False, root_path: str = ""
) -> list[Any]:
    """What an application sends for a request whose body comes in pieces."""
    messages = [{"type": "http.request", "body": part, "more_body": part is not body[-1]} for part in body]
    sent: list[Any] = []
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path, "root_path": root_path,
        "raw_path": path.encode(), "query_string": b"x=%20", "headers": [(b"authorization", b"Bearer \xff")],
        "client": ("192.0.2.7", 1), "server": ("127.0.0.1", 8000), "app": object(),
    }  # fmt: skip

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        if not leaves:
            await asyncio.Future()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def _answer(_: Any, error: LoRAPluginsError) -> Any:
    async def respond(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "error", "error": error})

    return respond


async def allowing(*_: Any) -> None: ...


async def not_asked(*_: Any) -> None:
    raise AssertionError("the follower's own application is not asked")


async def carried(
    follower: Follower, method: str, path: str, body: list[bytes], app: Any = not_asked, **more: Any
) -> Any:
    """As `asked`, of a follower's server, before whose own application a request is carried."""
    return await asked(CarryToLeader(app, lambda: follower, _answer), method, path, body, **more)


@listening
async def test_a_carried_request_is_answered_when_all_have_its_change(some: Servers) -> None:
    app = Application()

    async def leading_app(*connection: Any) -> None:
        await CarryToLeader(app, lambda: app.leader, _answer)(*connection)

    some.app = leading_app
    app.leader = some.leader
    carrier, other = await some.join(), await some.join()
    body = [b"x" * 200_000, b"y" * 100_000, b""]
    sent = await carried(carrier, "PUT", "/v1/loras/sql", body)
    assert (sent[0]["status"], sent[0]["headers"]) == (201, [(b"authorization", b"Bearer \xff")])
    assert b"".join(one["body"] for one in sent[1:]) == b"PUT /v1/loras/sql?x=%20 300000 192.0.2.7!"
    assert carrier.table == other.table == {"sql": Request("sql", 300_000)}


@listening
async def test_an_answer_waits_for_a_follower_that_still_writes(some: Servers) -> None:
    async def at_once(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.body", "body": b""})

    some.app = at_once
    reader, writer = await asyncio.open_unix_connection(some.folder / leading.SOCKET)
    frames.send(writer, {"scope": {"headers": [], "client": None, "server": None}})
    assert (await frames.receive(reader) or {})["type"] == "http.response.body"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(frames.receive(reader), 0.1)
    writer.close()


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/api/v1/load_lora_adapter", "/v1/loras/sql\n", "/v1/models"]
)
@listening
async def test_what_routes_match_is_carried(some: Servers, path: str) -> None:
    async def made(scope: Any, receive: Any, send: Any) -> None:
        route = path.removeprefix("/api").removesuffix("\n")
        await Router([Route(route, _created, methods=["POST"])])(scope, receive, send)

    some.app = made
    sent = await carried(await some.join(), "POST", path, [b""], root_path="/api")
    assert sent[0]["status"] == 201


@listening
async def test_what_serves_is_not_carried(some: Servers) -> None:
    app = Application()
    some.app = not_asked
    follower = await some.join()
    for path in ("/v1/completions", "/v1/loras-of-another", "/health", "/v1/models\n\n"):
        sent = await carried(follower, "POST", path, [b""], app)
        assert sent[0]["status"] == 201
    assert not has_started(some.folder, os.getpid())
    await CarryToLeader(allowing, lambda: follower, _answer)({"type": "lifespan"}, None, None)
    assert has_started(some.folder, os.getpid())
    sent = await asked(CarryToLeader(app, Leader, _answer), "POST", "/v1/loras", [b""])
    assert sent[0]["status"] == 201, "the only API server answers all"


@listening
async def test_a_caller_that_leaves_has_left_the_leader_too(some: Servers) -> None:
    app = Application()
    some.app = app
    sent = await carried(await some.join(), "POST", "/v1/loras/slow", [b""], leaves=True)
    await app.left.wait()
    assert [one["type"] for one in sent] == ["error"]


@pytest.mark.parametrize("begins", [False, True])
@listening
async def test_an_unexpected_error_of_the_leader_is_a_500(some: Servers, caplog: Any, *, begins: bool) -> None:
    """The follower took the closed connection for the leader's end, while it still wrote the body."""

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        if begins:  # as Starlette, which answers and raises
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"of Starlette"})
        raise ValueError("not ours")

    some.app = fails
    sent = await carried(await some.join(), "PUT", "/v1/loras/sql", [b"x" * 4_000_000] * 3)
    assert [one.get("status") for one in sent] == [500, None]
    assert [record.getMessage() for record in caplog.records] == ["A carried request failed: /v1/loras/sql"]


@listening
async def test_without_a_leader_a_carried_request_is_refused(some: Servers) -> None:
    follower = await some.join()
    some.leader.close()
    (some.folder / leading.SOCKET).unlink(missing_ok=True)
    (sent,) = await carried(follower, "GET", "/v1/loras", [b""])
    assert isinstance(sent["error"], SourceUnavailable)
