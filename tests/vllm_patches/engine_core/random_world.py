"""A random world: an engine in virtual time, its clients and trainers, and what must hold all along."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, NoFreeSlot
from lora_plugins.scheduler.messages import Activate, AdapterSpec, Load, Slots, to_plain
from lora_plugins.vllm_patches.engine_core import engine_core
from lora_plugins.vllm_patches.message_fields import VERSIONS, error_in
from tests.scheduler.simulated import held_count
from tests.vllm_patches.engine_bed import BLOCK, adapter, make_scheduler, request
from tests.vllm_patches.engine_core.cores import core_of
from tests.vllm_patches.engine_core.world_workers import SlowEngine, Workers

REST_STEPS = 4000
HASHER = get_request_block_hasher(BLOCK, sha256)


@dataclass
class Asked:
    """What a client asked for: tokens of all parts so far, and whether its tokens may end with a stop token."""

    lora: int | None
    tokens: int
    client: str = ""
    parts: int = 0  # of a session; 0 for a request of one part
    is_closed: bool = False
    may_stop: bool = False
    got: int = 0
    ended: list[Any] = field(default_factory=list)


@dataclass
class Call:
    kind: str
    lora: int
    answer: Any

    @property
    def is_answered(self) -> bool:
        return not isinstance(self.answer, Future) or self.answer.done()


class World:
    """See the module. `seed` decides all; `options` are of vLLM's, for a scheduler of `kind`."""

    def __init__(self, seed: int, options: Any, now: list[float], *, kind: type | None = None) -> None:
        self.choose = choose = random.Random(seed)
        self.now, self.seed = now, seed
        config = options(choose)
        self.is_async = config.scheduler_config.async_scheduling
        self.is_by_priority = config.scheduler_config.policy == "priority"
        self.has = {
            what: choose.random() < chance
            for what, chance in {
                "aborts": 0.4, "adapter pauses": 0.4, "pauses": 0.35, "calls": 0.5, "sessions": 0.35, "grammars": 0.3,
                "parts": 0.3, "faults": 0.25, "pins": 0.2, "moves": 0.3, "resets": 0.2, "retirements": 0.2,
                "copy faults": 0.1,
            }.items()
        }  # fmt: skip
        self.loras = list(range(1, choose.randint(2, 8)))
        self.in_store = choose.random() < 0.5
        self.versions = dict.fromkeys(self.loras, 0)
        self.load_steps = {it: choose.choice([0, 0, 1, 3, 10, 40]) for it in self.loras}
        self.copy_steps = choose.choice([0, 1, 3])
        self.step_s = choose.choice([0.02, 0.05, 0.3])
        pointed = choose.choice([0, 0, 0, 2, 4])
        instant = choose.choice(["all", "none", "odd"])
        slots = Slots(config.lora_config.max_loras, pointed)
        self.faults: set[int] = set()
        workers = Workers(
            slots, self._steps_of, self._fails, lambda it: instant == "all" or (instant == "odd" and it % 2)
        )
        # In vLLM, sessions that wait with their KV cache for more blocks are never preempted, and may stand still.
        blocks = max(choose.choice([6, 8, 12, 20, 64]), 300 * self.has["sessions"])
        self.scheduler = scheduler = make_scheduler(config, kind, blocks=blocks, slots=slots)
        self.engine = SlowEngine(scheduler, workers, lag=int(self.is_async))
        scheduler.structured_output_manager.accept_tokens = lambda *_: True
        if choose.random() < 0.5:  # the files are on this node
            scheduler.specs._weights_bytes = lambda _: 100
        scheduler.planner.state.cache.max_adapters = self.places = choose.randint(1, 4)
        self.core = core_of(scheduler, self.engine._under_way if self.is_async else None)
        self.asked: dict[str, Asked] = {}
        self.aborted: set[str] = set()
        self.calls: list[Call] = []
        self.grammars: list[tuple[float, Any]] = []
        self.paused: set[str] = set()
        self.changed: set[int] = set()
        self.retired: set[int] = set()
        self.has_pinned = self.has_aborted_parts = False
        self.numbers = 0
        self._seen = 0
        self.log: list[str] = []
        self._watch_order()

    # --- workers ---

    def _steps_of(self, command: Load | Activate) -> int:
        return self.load_steps[command.spec.engine_id] if isinstance(command, Load) else self.copy_steps

    def _fails(self, command: Load | Activate, spec: AdapterSpec) -> bool:
        is_load = isinstance(command, Load)
        fails = self.has["faults" if is_load else "copy faults"] and self.choose.random() < (0.3 if is_load else 0.1)
        if fails:
            self.faults.add(spec.engine_id)
        return fails

    # --- clients ---

    def lora_request(self, number: int, version: int | None = None) -> Any:
        lora, version = adapter(number), self.versions[number] if version is None else version
        lora.lora_path = f"/store/{number:032x}{version:032x}" if self.in_store else f"/elsewhere/{number}/{version}"
        return lora

    def ask(self, name: str, lora: int | None, *, tokens: int, prompt: int, client: str = "", **more: Any) -> Any:
        one = request(name, lora, tokens=tokens, prompt=prompt, arrival_time=self.now[0], block_hasher=HASHER, **more)
        if lora is not None:
            one.lora_request = self.lora_request(lora)
            one.block_hashes.clear()
            one.update_block_hashes()
        known = self.asked.get(name)
        if known is None:
            self.asked[name] = Asked(lora, tokens, client, parts=int(bool(more.get("resumable"))))
        return one

    def arrive(self) -> None:
        choose = self.choose
        self.numbers += 1
        number = self.numbers
        lora = None if choose.random() < 0.2 else choose.choice(self.loras)
        size = {"tokens": choose.randint(1, 20), "prompt": choose.choice([1, 4, 8, 16, 20, 40])}
        size |= {"priority": choose.choice([0, 0, 1, 5]) if self.is_by_priority else 0}
        kind = choose.random()
        if self.has["sessions"] and kind < 0.2:
            size |= {"tokens": choose.randint(1, 6), "prompt": choose.choice([1, 4, 8])}
            self.scheduler.add_request(self.ask(f"s{number}", lora, resumable=True, **size))
        elif self.has["parts"] and kind < 0.4:
            if choose.random() < 0.5:
                for part in range(choose.randint(2, 4)):
                    self.scheduler.add_request(self.ask(f"{part}_c{number}", lora, client=f"c{number}", **size))
            else:
                self.beams(f"b{number}", lora, 0, size)
        else:
            one = self.ask(f"r{number}", lora, **size)
            if choose.random() < 0.15:
                one.sampling_params.stop_token_ids, self.asked[one.request_id].may_stop = [choose.randint(5, 54)], True
            if self.has["grammars"] and choose.random() < 0.4:
                self.with_grammar(one)
            if self.has["calls"] and lora is not None and choose.random() < 0.03:
                one.lora_request.load_inplace = True
                self.changed.add(lora)
            self.scheduler.add_request(one)

    def beams(self, client: str, lora: int | None, turn: int, size: dict[str, int]) -> None:
        for beam in range(2):
            name = f"{client}-{turn:016x}-beam-{beam}-{self.numbers:08x}"
            self.scheduler.add_request(self.ask(name, lora, client=client, **(size | {"tokens": 1})))

    def with_grammar(self, one: Any) -> None:
        one.structured_output_request = SimpleNamespace(grammar=None, reasoning_ended=True)
        one.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.grammars.append((self.now[0] + self.choose.choice([0, 1, 5, 30]) * self.step_s, one))

    def go_on(self) -> None:
        """Clients send further parts; grammars become ready."""
        for ready_at, one in self.grammars:
            if ready_at <= self.now[0]:
                one.structured_output_request.grammar = object()
        self.grammars = [(at, one) for at, one in self.grammars if at > self.now[0]]
        for name, asked in list(self.asked.items()):
            if name in self.aborted or name not in self.scheduler.requests:
                continue
            if asked.parts and not asked.is_closed and self.choose.random() < 0.1:
                self.next_part(name, asked, is_last=asked.parts > 3 or self.choose.random() < 0.2)

    def next_part(self, name: str, asked: Asked, *, is_last: bool) -> None:
        tokens = self.choose.randint(1, 4)
        one = self.ask(name, asked.lora, tokens=tokens, prompt=self.choose.randint(1, 3), resumable=not is_last)
        one.priority = self.scheduler.requests[name].priority
        asked.is_closed = is_last
        if not is_last:
            asked.parts, asked.tokens = asked.parts + 1, asked.tokens + tokens
        self.scheduler.add_request(one)

    def abort(self, names: list[str]) -> None:
        self.aborted |= set(names)
        self.core.abort_requests(names)

    # --- trainers ---

    def act(self) -> None:
        """One thing that trainers and clients do besides requests."""
        choose = self.choose
        live = [name for name in self.asked if name in self.scheduler.requests]
        if self.has["aborts"] and live and choose.random() < 0.15:
            self.abort([choose.choice(live)])
        if self.has["resets"] and not self.has["sessions"] and choose.random() < 0.05:  # vLLM fails beside sessions
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        if self.has["adapter pauses"] and choose.random() < 0.12:
            lora = choose.choice(self.loras)
            if f"adapter-{lora}" in self.paused:
                self.resume(lora)
            else:
                self.pause(lora, choose.choice(["keep", "wait", "abort"]))
        if self.has["pauses"] and choose.random() < 0.1:
            if self.core.is_scheduler_paused():
                self.core.resume_scheduler()
            else:
                self.pause_all(choose.choice(["keep", "wait", "abort"]))
        while self.has["calls"] and choose.random() < 0.2:
            self.call(choose.choice(self.loras))

    def pause(self, lora: int, mode: str) -> None:
        name = f"adapter-{lora}"
        self.paused.add(name)
        answer = self.core.lora_plugins_pause(name, mode)
        if mode == "abort":
            self.has_aborted_parts = True
            self.abort(list(answer["request_ids"]))
        if self.choose.random() < 0.8:
            self.calls.append(Call("paused", lora, self.core.lora_plugins_paused(name, list(answer["clients"]))))
        self.log.append(f"pause {name} {mode}")

    def resume(self, lora: int) -> None:
        self.paused.discard(f"adapter-{lora}")
        self.core.lora_plugins_resume(f"adapter-{lora}")
        self.log.append(f"resume {lora}")

    def pause_all(self, mode: str) -> None:
        if mode == "abort":
            self.aborted |= set(self.scheduler.requests)
        self.calls.append(Call(f"pause {mode}", 0, self.core.pause_scheduler(mode)))
        self.log.append(f"pause_all {mode}")

    def call(self, lora: int) -> None:
        choose = self.choose
        kinds = ["add", "other", "in place", "remove", "load"]
        kinds += ["pin", "unpin"] * self.has["pins"] + ["retire"] * self.has["retirements"]
        kind = choose.choice(kinds)
        self.log.append(f"{kind} {lora}")
        try:
            answer = self._call(kind, lora)
        except LoRAPluginsError as error:
            assert self.explains(error, lora), error  # noqa: PT017 - one of several ways to answer
            return
        if answer is not None:
            self.calls.append(Call(kind, lora, answer))

    def _call(self, kind: str, lora: int) -> Any:
        choose, core = self.choose, self.core
        if lora in self.retired and kind not in ("remove", "retire", "unpin"):
            return None  # API servers give the id to no other version
        if kind in ("other", "in place", "remove", "retire", "load"):
            self.changed.add(lora)
        if kind == "other":
            self.versions[lora] += 1
        if kind in ("add", "other", "in place"):
            one = self.lora_request(lora)
            one.load_inplace = kind == "in place"
            return core.add_lora(one)
        if kind == "load":
            self.versions[lora] += 1
            spec = AdapterSpec(lora, f"adapter-{lora}", self.lora_request(lora).lora_path, size_bytes=100)
            moves, wants_slot = self.has["moves"] and choose.random() < 0.7, choose.random() < 0.5
            with mock.patch.object(engine_core, "moves_running", return_value=moves):
                return core.lora_plugins_load(to_plain(spec), wants_slot)
        if kind == "remove":
            return core.remove_lora(lora)
        if kind == "retire":
            self.retired.add(lora)
            refusal = AdapterNotFound("removed", adapter=f"adapter-{lora}") if choose.random() < 0.5 else None
            return core.lora_plugins_retire(lora, to_plain(refusal) if refusal else None)
        if kind == "unpin":
            core.lora_plugins_unpin(lora)
            return None
        self.has_pinned = True
        spec = AdapterSpec(lora, f"adapter-{lora}", self.lora_request(lora).lora_path, size_bytes=100)
        return core.lora_plugins_pin(to_plain(spec))

    # --- time ---

    def tick(self) -> bool:
        """One turn of the engine's loop; returns whether it had work."""
        self.core._process_input_queue()
        had_work = self.core.has_work()
        if had_work and self.scheduler.has_requests():
            self.engine.step()
        elif self.engine.is_under_way:
            self.engine.update_once()
        self.now[0] += self.step_s
        self._read_outputs()
        return bool(had_work)

    def _read_outputs(self) -> None:
        for output in self.engine.outputs[self._seen :]:
            asked = self.asked[output.request_id]
            asked.got += len(output.new_token_ids)
            if output.finish_reason is not None:
                asked.ended.append(output)
                is_whole = output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
                if "-beam-0" in output.request_id and is_whole and self.choose.random() < 0.6:
                    self.numbers += 1
                    self.beams(asked.client, asked.lora, self.numbers, {"tokens": 1, "prompt": 5})
        self._seen = len(self.engine.outputs)

    def run(self) -> None:
        """From the first request to the last answer."""
        choose = self.choose
        for _ in range(choose.randint(10, 60)):
            for _ in range(choose.choice([0, 0, 1, 1, 2, 6])):
                self.arrive()
            self.act()
            self.go_on()
            for _ in range(choose.choice([1, 1, 1, 5])):
                self.tick()
            if choose.random() < 0.03:
                self.rest()
        self.rest()
        if self.core.is_scheduler_paused():
            self.core.resume_scheduler()
            self.rest()
        for name in sorted(self.paused):
            self.resume(int(name.rpartition("-")[2]))
        self.rest()
        self.abort([name for name in self.scheduler.requests if self._is_dropped(name)])
        for name, asked in self.asked.items():
            if asked.parts and not asked.is_closed and name in self.scheduler.requests:
                self.next_part(name, asked, is_last=True)
        self.rest()
        self.at_end()

    def rest(self) -> None:
        """Until the engine has nothing to do; nobody waits for what will not come."""
        for _ in range(REST_STEPS):
            self.go_on()
            if not self.tick() and not self.grammars:
                break
        else:
            raise AssertionError(f"the engine does not come to rest: {self.scheduler.requests}")
        is_paused = self.core.is_scheduler_paused()
        may_wait = {"pin", "retire", "paused"} if is_paused else set[str]()
        waiting = [call for call in self.calls if not call.is_answered and call.kind not in may_wait]
        assert not waiting, f"{[(call.kind, call.lora) for call in waiting]} {self.log}"
        self.calls = [call for call in self.calls if not call.is_answered]

    def _is_dropped(self, name: str) -> bool:
        """VLLM drops a preempted session whose stale output ends its part, as the next part waits already."""
        one = self.scheduler.requests[name]
        return (
            one.resumable and one not in self.scheduler.running and not any(one in it for it in self.scheduler.queues)
        )

    # --- what must hold ---

    def _watch_order(self) -> None:
        """No request begins while vLLM passes over an earlier one that could run."""
        places, queues = self.scheduler._places, self.scheduler.queues
        begin_step, schedule = places.begin_step, self.scheduler.schedule
        waiting: list[tuple[Any, Any]] = []

        def begins() -> None:
            begin_step()
            waiting[:] = [
                (entry.order, entry.request)
                for each in queues
                for entry in each._entries.values()
                if (entry.group is None or entry.group in places.open_groups)
                and entry.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
                and not entry.request.num_stale_output_tokens
            ]
            self._no_inversion()

        def schedules() -> Any:
            output = schedule()
            began = [order for order, it in waiting if it.request_id in output.num_scheduled_tokens]
            if began:
                last = max(began)
                passed = [
                    it for order, it in waiting if order < last and it.request_id not in output.num_scheduled_tokens
                ]
                assert not passed, f"{[it.request_id for it in passed]} could run before {last}"
            return output

        places.begin_step, self.scheduler.schedule = begins, schedules

    def _no_inversion(self) -> None:
        """No adapter leaves where its own first request is of a better priority than all that wait for a slot."""
        state = self.scheduler.planner.state
        if not self.is_by_priority:
            return
        others = [it.order[1] for it in (*state.ready, *state.absent, *state.calling)]
        for it in state.leaving:
            if it in state.draining:
                continue
            best = min((held.order[1] for held in it.held.values() if not held.runs_on), default=1 << 20)
            assert not others or best >= min(others), f"{it.spec.name} waits with {best}, others with {min(others)}"

    def explains(self, error: LoRAPluginsError, lora: int | None) -> bool:
        if isinstance(error, InvalidAdapter):
            return lora in self.faults
        if isinstance(error, AdapterNotFound):
            return lora in self.changed or lora in self.retired
        return isinstance(error, NoFreeSlot) and self.has_pinned

    def at_end(self) -> None:
        for name, asked in self.asked.items():
            self._ended_well(name, asked)
        self.nothing_is_left()

    def _ended_well(self, name: str, asked: Asked) -> None:
        if name in self.aborted:
            return
        error = next((it for one in asked.ended if (it := error_in(one.stop_reason)) is not None), None)
        if error is not None:
            assert self.explains(error, asked.lora), f"{name}: {error} {self.log}"
            return
        if any(one.finish_reason is FinishReason.ABORT for one in asked.ended):
            assert self.has_aborted_parts, name
            assert asked.client, name
            return
        assert asked.ended, f"{name} has not ended"
        if asked.may_stop and asked.ended[-1].finish_reason is FinishReason.STOP:
            assert 0 < asked.got <= asked.tokens
            return
        assert asked.got == asked.tokens, f"{name} has {asked.got} tokens of {asked.tokens}"
        self._versions_are_right(name, asked)

    def _versions_are_right(self, name: str, asked: Asked) -> None:
        if asked.lora is None or asked.parts:
            return
        made_by = [path.rpartition("/")[2] if self.in_store else path for path in self.engine.weights[name]]
        spans = (asked.ended[-1].kv_transfer_params or {}).get(VERSIONS) or [(made_by[0], 0)]
        said = [[weights for weights, begin in spans if begin <= index][-1] for index in range(len(made_by))]
        assert said == made_by, f"{name}: {spans}, made by {made_by}"

    def nothing_is_left(self) -> None:
        scheduler = self.scheduler
        state, pauses, places = scheduler.planner.state, scheduler.pauses, scheduler._places
        self.now[0] += 1.0  # nothing is expected any more
        scheduler.plan()
        left = {
            "requests": scheduler.requests, "running": scheduler.running,
            "queues": [list(it) for it in scheduler.queues if len(it) or it._groups],
            "popped": places.popped, "removed": places.removed, "with kv": scheduler._waiting_with_kv,
            "versions": scheduler.answer_versions.spans, "deferred": scheduler.deferred_waiting,
            "sessions": scheduler.num_waiting_for_streaming_input,
            "pauses": pauses._pauses, "held by pauses": pauses._held, "pausing": pauses._calls,
            "of_request": state.of_request, "held": held_count(scheduler.planner),
            "stopped": state.stopped_count, "absent": list(state.absent), "ready": list(state.ready),
            "newly_held": list(state.newly_held), "regrouped": state.regrouped, "in flight": state.in_flight,
            "expecting": state.expecting, "calling": state.calling, "moving": state.moving, "leaving": state.leaving,
            "jobs": state.jobs, "loads": state.loads, "reserved": state.reserved_for, "draining": state.draining,
            "evicting": state.evicting, "commands": state.commands,
            "refused": state.refused, "touched": state.touched,
        }  # fmt: skip
        assert not any(left.values()), {what: it for what, it in left.items() if it}
        for it in state.adapters.values():
            used = it.held or it.stopped or it.running or it.expected or it.calls or it.job
            assert not used, it
            assert not it.is_retired, it
            assert it.is_loaded, it
            assert len(it._orders._heap) < 100, "places of requests that have gone"
        loaded = {it.key for it in state.adapters.values()}
        assert loaded == set(self.engine.workers.entries) == set(state.cache.sizes_bytes), "workers hold others"
        assert {it for it in state.open_groups if it in state.adapters.values()} == {
            it for it in state.adapters.values() if it.is_active
        }
        assert len(state.open_groups) == 2 * sum(it.is_active for it in state.adapters.values())
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are left"
