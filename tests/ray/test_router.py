"""The router between Ray's calls: which requests count for which replica, and whom it names."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from ray.serve.request_router import RequestRouter

from lora_plugins.ray import router as router_module
from lora_plugins.ray.replica import Call
from lora_plugins.ray.router import AdapterAffinityRouter
from lora_plugins.routing.residency import Tier
from tests.virtual_time import runs


@pytest.fixture(autouse=True)
def _without_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own part asks real replicas for their queues."""
    for name in ("update_replicas", "on_replica_actor_died"):
        monkeypatch.setattr(RequestRouter, name, lambda self, it: None)


@dataclass
class Replica:
    """As much of Ray's `RunningReplica` as a router looks at."""

    name: str
    routing_stats: dict[str, Any] = field(default_factory=dict)

    @property
    def replica_id(self) -> SimpleNamespace:
        return SimpleNamespace(unique_id=self.name)


class Router(AdapterAffinityRouter):
    """Made without Ray's own state."""

    def __init__(self) -> None:
        self.initialize_state(busy_requests=4, base_names=("base",))

    def in_flight(self) -> dict[str, int]:
        return {name: self._policy._load.of(name) for name in self._by_name}

    async def choose(self, request: Any) -> list[str]:
        return [rank[0].name for rank in await self.choose_replicas(list(self._by_name.values()), request)]


def request(adapter: str, number: int = 0, excluded: tuple[str, ...] = ()) -> Any:
    metadata = SimpleNamespace(internal_request_id=f"request-{number}", multiplexed_model_id=adapter)
    return SimpleNamespace(
        metadata=metadata,
        args=[Call("POST", "/v1/completions", (), b"", adapter, excluded)],
        future=asyncio.get_running_loop().create_future(),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def of(*names: str) -> Router:
    router = Router()
    router.update_replicas([Replica(name) for name in names])
    return router


@runs
async def test_requests_count_from_the_choice_to_their_end() -> None:
    router = of("a", "b", "c")
    requests = [request("sql", number) for number in range(4)]
    chosen = [(await router.choose(one))[0] for one in requests]
    assert len(set(chosen)) == 1
    assert router.in_flight()[chosen[0]] == 4
    assert (await router.choose(request("sql", 9)))[0] != chosen[0]
    for number in (0, 1, 2, 3, 9):
        for name in "abc":  # only the replica that has it ends it
            router.on_request_completed(Replica(name).replica_id, f"request-{number}")
    assert set(router.in_flight().values()) == {0}


@runs
async def test_request_counts_where_it_was_taken() -> None:
    router = of("a", "b")
    one = request("sql")
    first = (await router.choose(one))[0]
    other = "b" if first == "a" else "a"
    router.on_request_routed(one, Replica(other).replica_id, None)
    assert router.in_flight() == {first: 0, other: 1}


@runs
async def test_client_that_leaves_early_counts_no_longer() -> None:
    router = of("a", "b")
    one = request("sql")
    await router.choose(one)
    one.future.cancel()
    await asyncio.sleep(0)
    assert set(router.in_flight().values()) == {0}


@runs
async def test_where_the_best_replica_is_full_any_other_takes_it() -> None:
    router = of("a", "b", "c")
    one = request("sql")
    (best,), others = await router.choose_replicas(list(router._by_name.values()), one)
    assert sorted(replica.name for replica in others) == ["a", "b", "c"]
    router.on_request_routed(one, next(it for it in others if it is not best).replica_id, None)
    assert (await router.choose(one))[0] == best.name  # asked again, by itself
    assert sum(router.in_flight().values()) == 1


@runs
async def test_replicas_that_failed_are_asked_only_when_none_is_left() -> None:
    router = of("a", "b")
    assert (await router.choose(request("sql", 1, ("a",))))[0] == "b"
    assert (await router.choose(request("sql", 2, ("a", "b"))))[0] in {"a", "b"}


@runs
async def test_reports_of_replicas_are_believed() -> None:
    router = of("a", "b", "c")
    stats = {"adapters": {"sql": int(Tier.SLOT)}, "capacity": 3, "requests": 0}
    for name in ("a", "b", "c"):
        others = [Replica(other) for other in "abc" if other != name]
        router.update_replicas(others)  # where it was is forgotten
        router.update_replicas([*others, Replica(name, stats)])
        assert (await router.choose(request("sql")))[0] == name


@runs
async def test_dead_replica_is_not_named() -> None:
    router = of("a", "b")
    first = (await router.choose(request("sql")))[0]
    router.on_replica_actor_died(Replica(first).replica_id)
    assert (await router.choose(request("sql", 2)))[0] != first


def direct(model: str, number: int = 0) -> Any:
    """A request as Ray Serve LLM's direct streaming asks for it: nothing is heard of it after the choice."""
    asked = request("", number)
    asked.args = [SimpleNamespace(model=model, prompt="x")]
    return asked


@runs
async def test_direct_streaming_is_routed_by_the_model_of_the_body() -> None:
    router = of("a", "b", "c")
    first = (await router.choose(direct("sql", 1)))[0]
    assert {(await router.choose(direct("sql", number)))[0] for number in range(2, 5)} == {first}
    await router.choose(direct("base", 9))
    assert router._counted["request-9"][0] == ""
    assert (await router.choose(SimpleNamespace(**vars(request("")) | {"args": []})))[0] in {"a", "b", "c"}


@runs
async def test_direct_streaming_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "COUNTED_S", 0.05)
    router = of("a", "b")
    for number in range(4):
        await router.choose(direct("sql", number))
    assert sum(router.in_flight().values()) == 4  # so that those that come at once spread
    await asyncio.sleep(0.2)
    assert set(router.in_flight().values()) == {0}
    assert router._counted == {}


@runs
async def test_load_of_direct_streaming_is_that_of_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "COUNTED_S", 0.05)
    router = of("a", "b")
    home = (await router.choose(direct("sql")))[0]
    other = "b" if home == "a" else "a"
    await asyncio.sleep(0.2)
    for requests in (7, 8, 9):  # the first two may be older than the end of what the router counted
        stats = {"adapters": {"sql": int(Tier.SLOT)}, "capacity": 3, "requests": requests}
        router.update_replicas([Replica(home, stats), Replica(other, {"requests": 0})])
    assert router.in_flight() == {home: 9, other: 0}
    assert (await router.choose(direct("sql", 2)))[0] == other


@runs
async def test_a_request_without_any_replica_is_not_remembered() -> None:
    router = of()
    assert await router.choose_replicas([], request("sql")) == [[]]
    assert router._counted == {}
