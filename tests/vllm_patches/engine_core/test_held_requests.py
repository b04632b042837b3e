"""A held request is vLLM's from its arrival: what others hear of it, how it ends, and that nothing waits for it.

Where vLLM's own class has a say, the same is asked of it: there the request waits as any other does.
"""

from __future__ import annotations

import inspect
import os
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEventType, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import RequestStatus

from lora_plugins.errors import AdapterNotFound, InvalidAdapter
from lora_plugins.scheduler.messages import AdapterSpec
from lora_plugins.vllm_patches.engine_core.scheduler import AdmittingScheduler
from lora_plugins.vllm_patches.message_fields import error_in
from tests.vllm_patches.engine_bed import Clock, Engine, Make, request

ABORTED = RequestStatus.FINISHED_ABORTED


def aborted(engine: Engine, names: str | list[str] | None) -> set[str]:
    return {one.request_id for one in engine.scheduler.finish_requests(names, ABORTED)}


# --- aborted, and asked for again at once ---


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("retry", ["is answered", "is answered at the third time", "fails", "is given up too"])
@pytest.mark.parametrize(
    "places",
    [(1, 1), *(pytest.param(it, marks=pytest.mark.nightly) for it in [(1, 2), (4, 4)]), (4, 8)],
    ids=lambda places: f"{places[0]} of {places[1]}",
)
def test_a_retry_leaves_all_others_answered(make_engine: Make, places: tuple[int, int], retry: str, steps: int) -> None:
    """While room is made for its adapter, or this is loaded; where it was given up too, an engine crashed once."""
    engine = fully_used(make_engine, *places)
    if retry == "fails":
        engine.fails[99] = InvalidAdapter("nothing that can be read")
    give_up_and_retry(engine, 3 if "third" in retry else 1, steps)
    if retry == "is given up too":
        for _ in range(30):
            engine.step()
        aborted(engine, "last")
    for number in range(100, 103):
        engine.add(f"other-{number}", number)
    engine.run()
    if retry == "fails":
        assert engine.end_of("last").finish_reason is FinishReason.ERROR
    elif retry != "is given up too":
        assert len(engine.tokens_of("last")) == 3
    assert {len(engine.tokens_of(f"running-{number}")) for number in range(1, 1 + places[1])} == {12}
    assert {len(engine.tokens_of(f"other-{number}")) for number in range(100, 103)} == {3}


def fully_used(make_engine: Make, slots: int, places: int) -> Engine:
    """Every place in host memory has an adapter that is asked for, and every slot one that runs."""
    engine = make_engine(max_loras=slots, max_cpu_loras=places)
    for number in range(1, 1 + places):
        engine.add(f"running-{number}", number, tokens=12)
    while not engine.tokens_of("running-1"):
        engine.step()
    return engine


def give_up_and_retry(engine: Engine, times: int, steps: int) -> None:
    """`steps` after each arrival its client gives up, and asks again before the next step."""
    engine.add("x-0", 99)
    for number in range(times):
        for _ in range(steps):
            engine.step()
        assert aborted(engine, f"x-{number}") <= {f"x-{number}"}
        engine.add("last" if number == times - 1 else f"x-{number + 1}", 99)


# --- what connectors hear ---


KV = KVTransferConfig(
    kv_connector="KVRecorder", kv_role="kv_both", kv_connector_module_path="tests.vllm_patches.recording_connectors"
)
EC = ECTransferConfig(
    ec_connector="ECRecorder", ec_role="ec_consumer", ec_connector_module_path="tests.vllm_patches.recording_connectors"
)


class Waiting:
    """A request `a` that waits: for its adapter, which is loaded until `go_on`, or for the end of a pause."""

    def __init__(self, make_engine: Make, how: str, **transfers: Any) -> None:
        self.engine = make_engine(is_stock=how == "vLLM's own", **transfers)
        self.scheduler = self.engine.scheduler
        self.pauses = how != "held"

    def begin(self, steps: int = 3, *, kv_transfer_params: dict[str, Any] | None = None) -> None:
        self.engine.holds_back = True
        if self.pauses:
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        one = request("a", 1)
        one.kv_transfer_params = kv_transfer_params
        self.engine.add(one)
        for _ in range(steps):
            assert "a" not in self.engine.step()

    def go_on(self) -> None:
        self.engine.holds_back = False
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.engine.run()
        assert not self.scheduler.has_requests()

    @property
    def heard(self) -> list[tuple[str, ...]]:
        return list(self.scheduler.connector.heard)

    @property
    def heard_of_encoders(self) -> list[tuple[str, ...]]:
        return list(self.scheduler.ec_connector.heard)


@pytest.fixture(params=["vLLM's own", "held", "held in a pause"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_connectors_hear_of_arrivals_and_ends(make_engine: Make, how: str) -> None:
    waiting = Waiting(make_engine, how, kv_transfer_config=KV, ec_transfer_config=EC)
    waiting.begin(steps=0)
    assert waiting.heard == [("came", "a")]
    for _ in range(3):
        assert "a" not in waiting.engine.step()
    assert not waiting.scheduler.has_finished_requests(), "vLLM's counts agree"
    waiting.go_on()
    ended = ("ended", "a", "FINISHED_LENGTH_CAPPED")
    assert (waiting.heard, waiting.heard_of_encoders) == ([("came", "a"), ended], [ended])
    assert waiting.engine.gone == ["a"]


@pytest.mark.parametrize("names", ["a", None], ids=["by id", "all"])
@pytest.mark.parametrize("steps", [0, 3])
def test_connectors_hear_of_an_abort(make_engine: Make, how: str, steps: int, names: str | None) -> None:
    waiting = Waiting(make_engine, how, finished_set=True, kv_transfer_config=KV, ec_transfer_config=EC)
    waiting.begin(steps)
    assert aborted(waiting.engine, names) == {"a"}
    assert aborted(waiting.engine, names) == set()
    ended = ("ended", "a", "FINISHED_ABORTED")
    assert (waiting.heard, waiting.heard_of_encoders) == ([("came", "a"), ended], [ended])
    assert waiting.scheduler.has_requests(), "the workers are to be told"
    waiting.go_on()
    assert waiting.engine.gone == ["a"]
    assert waiting.engine.finished == [{"a"}]
    assert waiting.heard == [("came", "a"), ended]


def test_connectors_hear_of_a_refusal(make_engine: Make) -> None:
    waiting = Waiting(make_engine, "held", finished_set=True, kv_transfer_config=KV, ec_transfer_config=EC)
    waiting.engine.fails[1] = InvalidAdapter("nothing that can be read")
    waiting.begin()
    waiting.go_on()
    assert waiting.engine.end_of("a").finish_reason is FinishReason.ERROR
    ended = ("ended", "a", "FINISHED_ERROR")
    assert (waiting.heard, waiting.heard_of_encoders) == ([("came", "a"), ended], [ended])
    assert waiting.engine.gone == ["a"]
    assert waiting.engine.finished == [{"a"}]


def test_connectors_hear_of_a_refusal_on_arrival(make_engine: Make) -> None:
    """Its adapter has been taken down."""
    waiting = Waiting(make_engine, "held", kv_transfer_config=KV)
    waiting.begin()
    waiting.scheduler.planner.retire(2, 0.0, AdapterNotFound("an adapter that was removed"), is_last=True)
    waiting.engine.add("b", 2)
    waiting.go_on()
    assert waiting.engine.end_of("b").finish_reason is FinishReason.ERROR
    assert [one for one in waiting.heard if one[1] == "b"] == [("came", "b"), ("ended", "b", "FINISHED_ERROR")]
    assert sorted(waiting.engine.gone) == ["a", "b"]


NIXL = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer", kv_load_failure_policy="fail")
THERE = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "prefill",
    "remote_request_id": "a-there",
    "remote_host": "localhost",
    "remote_port": 1,
    "tp_size": 1,
}


def told_by_nixl(waiting: Waiting) -> list[Any]:
    """The metadata of steps. Blocks that another instance computed for a request are leased until it has them."""
    return [output.kv_connector_metadata for output in waiting.engine.sent]


def test_nixl_renews_the_lease_while_a_request_waits(make_engine: Make, how: str) -> None:
    waiting = Waiting(make_engine, how, kv_transfer_config=NIXL)
    waiting.begin(1, kv_transfer_params=dict(THERE))
    (told,) = told_by_nixl(waiting)
    assert {engine: beat.req_ids for engine, beat in told.heartbeat_by_engine.items()} == {"prefill": {"a-there"}}


# --- sessions whose input comes in parts ---


def part(name: str, lora: int | None, tokens: int = 2, **more: Any) -> Any:
    return request(name, lora, tokens=tokens, resumable=True, **more)


def end(name: str, lora: int | None) -> Any:
    return request(name, lora, tokens=1)


def said_to_clients(engine: Engine) -> dict[str, list[Any]]:
    """Tokens, the reasons of ends, and events, by request; but preemptions, which sessions have that are held again."""
    said: dict[str, list[Any]] = {}
    for one in engine.outputs:
        of = said.setdefault(one.request_id, [[], [], []])
        of[0] += one.new_token_ids
        of[1] += [] if one.finish_reason is None else [one.finish_reason]
        of[2] += [event.type for event in one.events or () if event.type != EngineCoreEventType.PREEMPTED]
    return said


SESSIONS = [
    "part rest other rest part rest end rest",
    "part rest other rest part part rest other rest part end rest",
    "part part rest other rest part rest other rest end rest",
    "part end rest other rest",
    "part part end rest other rest",
    "part rest end rest other rest",
    "part rest other rest end rest",
    "part rest abort rest other rest",
    "part rest other rest abort rest",
    "part abort rest other rest part rest end rest",
    "part rest other part abort rest",
    "part rest other rest part part abort rest other rest",
    "part rest other rest part end abort rest",
    "part rest other rest part other rest end rest",
    "part rest other step step part rest end rest",
]


@pytest.mark.parametrize("script", SESSIONS)
def test_sessions_are_vllms(make_engine: Make, script: str) -> None:
    """One slot. At each `rest` nothing is left to be done, although the session may be idle."""
    ours = make_engine(max_cpu_loras=1, finished_set=True)
    vllms = make_engine(max_cpu_loras=1, finished_set=True, is_stock=True)
    for number, word in enumerate(script.split()):
        said = []
        for engine in (ours, vllms):
            match word:
                case "part":
                    said.append(engine.scheduler.add_request(part("a", 1)))
                case "end":
                    said.append(engine.scheduler.add_request(end("a", 1)))
                case "other":
                    said.append(engine.scheduler.add_request(request(f"b{number}", 2)))
                case "abort":
                    said.append(aborted(engine, "a"))
                case "step":
                    engine.step()
                    said.append(None)
                case "rest":
                    engine.run()
                    said.append(
                        (
                            engine.scheduler.get_request_counts(),
                            engine.scheduler.get_num_unfinished_requests(),
                            set(engine.scheduler.requests),
                            sorted(engine.gone),
                        )
                    )
        assert said[0] == said[1], f"after {number} {word}"
    assert said_to_clients(ours) == said_to_clients(vllms)
    assert Counter(name for names in ours.finished for name in names) == Counter(
        name for names in vllms.finished for name in names
    )


def test_sessions_held_again_keep_no_place_of_workers(make_engine: Make) -> None:
    engine = make_engine(max_cpu_loras=1)
    sessions = [f"s{number}" for number in range(7)]
    for name in sessions:
        engine.add(part(name, 1))
    engine.run()
    assert engine.known >= set(sessions)
    engine.add("b0", 2, tokens=20)
    engine.step()
    for name in sessions:
        engine.add(part(name, 1))
    for number in range(1, 8):
        engine.add(f"b{number}", 2, tokens=20)
    engine.run()  # which checks the places
    assert {len(engine.tokens_of(name)) for name in sessions} == {4}
    assert {len(engine.tokens_of(f"b{number}")) for number in range(8)} == {20}


@pytest.mark.parametrize("is_stock", [False, True], ids=["ours", "stock"])
def test_a_session_held_again_keeps_no_kv_cache(make_engine: Make, is_stock: bool) -> None:
    engine = make_engine(max_cpu_loras=1, blocks=5, is_stock=is_stock)  # one of these is vLLM's own
    engine.answer(part("a", 1, prompt=30))
    engine.add("b", 2, tokens=44)
    engine.step()
    for more in (part("a", 1), end("a", 1)):
        engine.add(more)
    engine.run()
    assert len(engine.tokens_of("a")) == 4
    assert len(engine.tokens_of("b")) == 44


def test_a_session_whose_adapter_is_there_keeps_its_kv_cache(make_engine: Make) -> None:
    engine = make_engine()
    engine.answer(part("a", 1, prompt=20))
    before = len(engine.sent)
    engine.answer(part("a", 1, prompt=20))
    assert sum(output.num_scheduled_tokens.get("a", 0) for output in engine.sent[before:]) < 30
    assert all(not output.preempted_req_ids for output in engine.sent)


def test_a_session_whose_adapter_fails_later_gets_the_error(make_engine: Make) -> None:
    engine = make_engine(max_cpu_loras=1, finished_set=True)
    engine.answer(part("a", 1))
    engine.answer("b", 2)
    engine.fails[1] = InvalidAdapter("nothing that can be read")
    engine.answer(part("a", 1))
    assert len(engine.tokens_of("a")) == 2
    assert [one.finish_reason for one in engine.outputs if one.request_id == "a"][-1] is FinishReason.ERROR
    assert "a" in engine.gone
    assert "a" not in engine.scheduler.requests
    assert not engine.scheduler.has_requests()


def test_no_file_system_is_asked_for_what_was_evicted(make_engine: Make, tmp_path: Path, monkeypatch) -> None:
    """The store may be a mount that hangs, and all requests wait for the scheduler."""
    engine, listed, scandir = make_engine(max_cpu_loras=1), list[str](), os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(str(path)), scandir(path))[1])
    paths = [tmp_path / (digit * 64) for digit in "12"]
    for path in paths:
        path.mkdir()
        (path / "adapter_model.safetensors").write_bytes(bytes(50))
    for name, number in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        asking = request(name, number)
        asking.lora_request = LoRARequest(f"adapter-{number}", number, str(paths[number - 1]))
        engine.answer(asking)
        assert len(engine.tokens_of(name)) == 3
    assert listed == [str(path) for path in paths]


# --- the control: no adapters, or adapters that are all there ---

CONTROLS: dict[str, dict[str, Any]] = {
    "no adapters": {"blocks": 64},
    "preemptions": {"blocks": 8},
    "LoRA off": {"blocks": 64, "lora": False},
    "LoRA off, preemptions": {"blocks": 8, "lora": False},
    **{f"adapters, {seed}": {"max_loras": 8} for seed in range(4)},
}


@pytest.mark.parametrize("control", CONTROLS)
def test_where_no_adapter_is_missing_requests_go_as_by_vllm(make_engine: Make, control: str) -> None:
    """Arrivals, aborts and sessions with adapters, step by step."""
    config, choose, known, live = CONTROLS[control], random.Random(control), 0, set[str]()
    ours, vllms = (make_engine(finished_set=True, is_stock=is_stock, **config) for is_stock in (False, True))
    assert isinstance(ours.scheduler, AdmittingScheduler) is config.get("lora", True)
    loras = config.get("max_loras", 0)
    for engine in (ours, vllms):
        for number in range(1, 1 + loras):
            engine.add(f"warm-{number}", number, tokens=1)
        engine.run()
        for record in (engine.outputs, engine.finished, engine.sent):
            record.clear()
    sessions: dict[str, int] = {}
    for _ in range(150):
        made: list[tuple[str, dict[str, Any]]] = []
        if choose.random() < 0.4 and (not loras or len(live) < 6):  # so few adapters all have room in each batch
            known += 1
            name = f"r{known}"
            live.add(name)
            more = {"tokens": choose.randint(1, 20), "prompt": choose.randint(1, 6 if loras else 40)}
            if loras:
                more |= {"lora": choose.randint(1, loras), "resumable": choose.random() < 0.4}
            if more.get("resumable"):
                sessions[name] = more["lora"]
            made.append((name, {"client_index": choose.randint(0, 1), **more}))
        for name, lora in list(sessions.items()):
            if name in live and choose.random() < 0.15:
                ends = choose.random() < 0.3
                made.append((name, {"lora": lora, "tokens": choose.randint(1, 3), "prompt": 2, "resumable": not ends}))
                if ends:
                    del sessions[name]
        gone = choose.choice(sorted(live)) if live and choose.random() < 0.08 else None
        sessions.pop(gone or "", None)
        for engine in (ours, vllms):
            for name, options in made:
                engine.add(name, **options)
        assert gone is None or aborted(ours, gone) == aborted(vllms, gone)
        for method in ("get_num_unfinished_requests", "get_request_counts", "has_finished_requests"):
            assert getattr(ours.scheduler, method)() == getattr(vllms.scheduler, method)(), method
        has_work = [engine.scheduler.has_requests() for engine in (ours, vllms)]
        assert has_work[0] == has_work[1] or (loras and has_work[0])
        assert ours.step() == vllms.step()
        assert ours.finished == vllms.finished
        assert sorted(ours.gone) == sorted(vllms.gone)
        assert said_to_clients(ours) == said_to_clients(vllms)
        live = {name for name in live if name in vllms.scheduler.requests}
        assert live <= ours.scheduler.requests.keys()
        sessions = {name: lora for name, lora in sessions.items() if name in live}
    assert known > 20
    assert len(ours.outputs) > 100


# --- what one request of a client becomes ---


def sent_by_a_client(external: str, **sampling: Any) -> Any:
    """What vLLM makes of one: its id, and its sampling parameters."""
    params = SamplingParams(**sampling)
    one = SimpleNamespace(request_id=external, external_req_id=None, params=params, sampling_params=params)
    InputProcessor.assign_request_id(one)
    return one


class Beams:
    """One client's beam search, as vLLM makes requests of it: those of the next token when all of the last ended."""

    def __init__(self, engine: Engine, lora: int, *, width: int = 2) -> None:
        from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

        code = inspect.getsource(BeamSearchOnlineMixin.beam_search)
        assert 'request_id_batch = f"{request_id}-{random_uuid()}"' in code
        assert 'request_id_item = f"{request_id_batch}-beam-{i}"' in code
        self.engine, self.lora, self.width = engine, lora, width
        self.id = f"cmpl-{random_uuid()}-0"
        self.made: list[list[str]] = []

    def next_token(self) -> list[str]:
        batch = f"{self.id}-{random_uuid()}"
        beams = range(self.width if self.made else 1)
        self.made.append([sent_by_a_client(f"{batch}-beam-{i}").request_id for i in beams])
        for name in self.made[-1]:
            self.engine.add(name, self.lora, tokens=1, prompt=4 + len(self.made))
        return self.made[-1]

    @property
    def has_ended(self) -> bool:
        return all(self.engine.tokens_of(name) for name in self.made[-1])


@pytest.mark.parametrize("between_s", [0.0, 0.02, 0.09])
def test_beams_of_the_next_token_are_admitted_at_once(make_engine: Make, clock: Clock, between_s: float) -> None:
    """Others wait for the only slot; the client takes `between_s` for its choice of beams."""
    engine = make_engine(max_cpu_loras=1)
    beams = Beams(engine, 1)
    beams.next_token()
    while not beams.has_ended:
        clock.step(engine)
    for number in range(4):
        engine.add(f"other-{number}", 2 + number)
    for _ in range(6):
        names, came_at, steps = beams.next_token(), clock.now, 0
        while not beams.has_ended:
            scheduled = clock.step(engine)
            steps += 1
            assert steps > 1 or scheduled.keys() >= set(names), "at once"
            assert steps < 100, f"unanswered after {clock.now - came_at} s"
        ended_at = clock.now
        while clock.now < ended_at + between_s:
            clock.step(engine)
    ended_at = clock.now
    while not all(len(engine.tokens_of(f"other-{number}")) == 3 for number in range(4)):
        clock.step(engine)
        assert clock.now < ended_at + 10, "the others are never served"


def test_all_children_of_a_request_are_admitted_as_one(make_engine: Make, clock: Clock) -> None:
    """Of `n=3`: they come one by one, and the turn of their adapter may pass meanwhile."""
    for early in range(8):
        engine = make_engine(max_cpu_loras=1)
        parent = ParentRequest(sent_by_a_client(f"cmpl-{random_uuid()}-0", n=3))
        names = [parent.get_child_info(index)[0] for index in range(3)]
        engine.add("long", 1, tokens=55)
        while not engine.tokens_of("long"):
            clock.step(engine)
        engine.add("other", 2)
        for _ in range(9 + early):
            clock.step(engine, 0.1)
        engine.add(names[0], 1, tokens=20)
        clock.step(engine, 0.1)
        is_in = bool(engine.sent[-1].num_scheduled_tokens.get(names[0]))
        for name in names[1:]:
            engine.add(name, 1, tokens=20)
            scheduled = clock.step(engine, 0.1)
            assert name in scheduled or not is_in, "the first is"
        engine.run()
        assert {len(engine.tokens_of(name)) for name in names} == {20}
        assert len(engine.tokens_of("other")) == 3


def test_a_session_whose_version_was_replaced_gets_an_error(make_engine: Make) -> None:
    """Its KV cache is of the old weights."""
    engine = make_engine(max_loras=2, max_cpu_loras=4)
    engine.answer("s", 7, tokens=2, resumable=True)
    for _ in range(2):
        engine.scheduler.planner.load(AdapterSpec(7, "adapter-7", "/store/7"), 0.0, is_other=True)
        engine.run()
    engine.answer("s", 7, tokens=2, resumable=True, prompt=2)
    assert error_in(engine.outputs[-1].stop_reason).code == "L002"
    assert "s" not in engine.scheduler.requests
    engine.answer("new", 7)
    assert len(engine.tokens_of("new")) == 3


def test_a_refusal_answers_no_later_request_of_its_id(make_engine: Make) -> None:
    engine = make_engine()
    engine.scheduler.planner.retire(2, 0.0, AdapterNotFound("an adapter that was removed"), is_last=True)
    engine.add("a", 2)
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.answer("a", 1)
    assert len(engine.tokens_of("a")) == 3
