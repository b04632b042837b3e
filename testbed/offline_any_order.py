"""vLLM's own calls about adapters in any order, on an engine in this process: each answer is of the version it names.

The question is that of `testbed.offline`, with adapters that stand for versions. `ANSWERS`, in the environment, has
what PEFT says with each to the prompt `REPEATED` times, which is so long that its prefix is cached; `EXAMPLES`, how
many orders are tried, and again where fewer requests were answered. The answer, a line of standard output: `said`, the
number of requests that were answered. A wrong one ends the program with the order that led to it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

REPEATED = 17
_TRIES = 5  # a few orders may ask nothing by chance
IDS = st.integers(1, 3)
VERSIONS = st.integers(0, 3)


class World:
    """The engine, which all orders use one after another, and what is known of it.

    Attributes:
        own: one directory of each id, in which versions are exchanged. answered: requests so far.
    """

    def __init__(self, base: str, prompt: str, max_tokens: int, adapters: list[tuple[str, str]]) -> None:
        from vllm import LLM, SamplingParams

        llm = LLM(
            base, enable_lora=True, max_lora_rank=64, max_loras=2, max_cpu_loras=16, dtype="float32",
            enforce_eager=True, max_model_len=256, max_num_seqs=16, block_size=32,
        )  # fmt: skip
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.prompt = REPEATED * prompt
        self.paths = [path for _, path in adapters]
        answers = json.loads(os.environ["ANSWERS"])
        self.expected = [answers[name] for name, _ in adapters]
        self.own = Path(tempfile.mkdtemp())
        self.answered = 0
        self.requests = 0


world: World


class AnyOrder(RuleBasedStateMachine):
    """Each id has a name of its own; which version it stands for is what its last successful call said."""

    def check(self, is_right: bool, what: object) -> None:
        """End the program where something is wrong: when loads end is not the same in another run of this order."""
        if not is_right:
            print("\n".join([*self.done, f"wrong: {what}"]), file=sys.stderr, flush=True)
            os._exit(1)

    @initialize()
    def begin(self) -> None:
        self.done: list[str] = []
        self.current: dict[int, int] = {}  # versions by id
        self.on_disk: dict[int, int] = {}  # of the directories that are exchanged
        self.asked: dict[str, int] = {}  # versions by request
        self.pinned: set[int] = set()
        self.first: set[str] = set()  # requests that brought their id

    def lora(self, engine_id: int, path: str, *, load_inplace: bool = False) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"adapter-{engine_id}", engine_id, path, load_inplace=load_inplace)

    def tried(self, call: Any) -> bool:
        """Whether a call said True; what has no room says so."""
        try:
            return bool(call())
        except Exception as error:
            self.done.append(f"refused: {error}")
            self.check("[L001]" in str(error) or "not registered" in str(error), error)
            return False

    @rule(engine_id=IDS, version=VERSIONS, load_inplace=st.booleans())
    def add(self, engine_id: int, version: int, load_inplace: bool) -> None:
        lora = self.lora(engine_id, world.paths[version], load_inplace=load_inplace)
        if self.tried(lambda: world.engine.add_lora(lora)):
            self.current[engine_id] = version
        self.done.append(f"add {lora}: {self.current.get(engine_id)}")

    @rule(engine_id=IDS, version=VERSIONS)
    def exchange_files(self, engine_id: int, version: int) -> None:
        own = world.own / str(engine_id)
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(world.paths[version], own)
        self.on_disk[engine_id] = version
        self.done.append(f"on disk {engine_id}: {version}")

    @rule(engine_id=IDS)
    def load_in_place(self, engine_id: int) -> None:
        if engine_id in self.on_disk:
            lora = self.lora(engine_id, str(world.own / str(engine_id)), load_inplace=True)
            if self.tried(lambda: world.engine.add_lora(lora)):
                self.current[engine_id] = self.on_disk[engine_id]
            self.done.append(f"in place {lora}: {self.current.get(engine_id)}")

    @rule(engine_id=IDS)
    def remove(self, engine_id: int) -> None:
        was_here = world.engine.remove_lora(engine_id)
        self.done.append(f"remove {engine_id}: {was_here}")
        self.check(engine_id in self.current or not was_here, self.current)  # it may have been evicted
        self.current.pop(engine_id, None)
        self.check(engine_id not in world.engine.list_loras(), "listed")

    @rule(engine_id=IDS)
    def pin(self, engine_id: int) -> None:
        if engine_id in self.current:
            self.tried(lambda: world.engine.pin_lora(engine_id))

    @rule(engine_id=IDS, version=VERSIONS, is_stub=st.booleans())
    def generate(self, engine_id: int, version: int, is_stub: bool) -> None:
        """With any path, where the id is known; with its own, where it is not."""
        path = "/a/stub" if is_stub and engine_id in self.current else world.paths[version]
        if engine_id not in self.current:
            self.current[engine_id] = version
            self.first.add(f"r{world.requests + 1}")
        self.ask(engine_id, path)

    @rule(engine_id=IDS)
    def generate_in_place(self, engine_id: int) -> None:
        if engine_id in self.on_disk:
            self.current[engine_id] = self.on_disk[engine_id]
            self.ask(engine_id, str(world.own / str(engine_id)), load_inplace=True)

    def ask(self, engine_id: int, path: str, *, load_inplace: bool = False) -> None:
        world.requests += 1
        name = f"r{world.requests}"
        self.asked[name] = self.current[engine_id]
        self.done.append(f"ask {name} of {engine_id}, {path}, {load_inplace}: {self.asked[name]}")
        lora = self.lora(engine_id, path, load_inplace=load_inplace)
        world.engine.add_request(name, world.prompt, world.sampling, lora_request=lora)

    @rule(at=st.integers(0, 20))
    def abort(self, at: int) -> None:
        # Aborted before it is loaded, one that brought its id leaves it unknown, and the next path counts.
        names = [name for name in self.asked if name not in self.first]
        if names:
            name = names[at % len(names)]
            world.engine.abort_request([name])
            self.done.append(f"abort {name}")
            del self.asked[name]

    @rule()
    def pause_or_resume(self) -> None:
        if world.core.is_scheduler_paused():
            world.core.resume_scheduler()
            self.done.append("resume")
        else:
            self.done.append("pause")
            world.core.pause_scheduler("keep", clear_cache=False)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        self.done.append(f"{steps} steps")
        for _ in range(steps):
            if not world.core.is_scheduler_paused() and world.engine.has_unfinished_requests():
                self.take(world.engine.step())

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            name = output.request_id.partition("-")[0]
            if not output.finished or name not in self.asked:
                continue
            made = output.outputs[0]
            version = self.asked.pop(name)
            said = [number for number, ids in enumerate(world.expected) if ids == list(made.token_ids)]
            self.check(said == [version], (name, version, said, made))
            world.answered += 1

    def teardown(self) -> None:
        if not hasattr(self, "asked"):
            return
        world.core.resume_scheduler()
        while world.engine.has_unfinished_requests():
            self.take(world.engine.step())
        self.check(not self.asked, self.asked)
        for engine_id in (1, 2, 3):
            world.engine.remove_lora(engine_id)
        self.check(not world.engine.list_loras(), "listed at the end")


def main() -> None:
    global world  # noqa: PLW0603 - hypothesis makes the machines
    base, prompt, max_tokens, adapters = json.loads(sys.argv[1])
    world = World(base, prompt, max_tokens, adapters)
    orders = settings(
        max_examples=int(os.environ["EXAMPLES"]),
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for _ in range(_TRIES):
        run_state_machine_as_test(AnyOrder, settings=orders)
        if world.answered > orders.max_examples:
            break
    print("\n" + json.dumps({"said": world.answered}), flush=True)


if __name__ == "__main__":
    main()
