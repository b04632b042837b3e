"""Goal of R34, R46 and R50 over time (docs/reference/deployments.md#the-soak): `make soak`.

`python -m soak --seconds 1800 --seed 7`; exits with 1 where an invariant did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import circumstances
from lora_plugins.errors import SourceUnavailable
from soak.bank import CACHE, VERSIONS, Bank, prepare
from soak.clients import (
    LONGEST_REQUEST_S,
    ROUTES,
    ImpatientSteps,
    Steps,
    Target,
    ask,
    ask_again,
    connect,
    run_client,
)
from soak.invariants import Monitor, check_counts, check_log, check_nothing_is_left
from soak.journal import Journal, kept, progress, table
from soak.mutants import MUTANTS, mutated
from soak.operators import Operator
from soak.oracle import Asked
from soak.restart import Lives
from soak.server import Sample, Surroundings, growth_mb_per_min
from soak.source_faults import SourceFaults
from soak.store_faults import FullDisk, Neighbour, interposer
from soak.world import Name, World
from testbed.hub import local_hub
from testbed.proxy import fault_proxy
from testbed.s3 import s3_server

CLIENTS, IMPATIENT, OPERATORS = 12, 4, 6
# Parts of the whole time: the last server has most of it to show that nothing grows.
_KILL_AT = (0.15, 0.35)
_LOOK_S, _SAMPLE_S, _PRINT_S = 5.0, 2.0, 15.0
# After a third of a server's life. vLLM alone grows too: its CPU worker by 230 MB with the first 2,500 requests of the
# base model.
MOST_GROWTH_MB_PER_MIN, LEAST_MINUTES = 3.0, 5.0
CONTROLS = ("wrong-version", "leak", *MUTANTS)


@dataclass
class Plan:
    """What to run; `control` breaks something, so that the soak must fail."""

    seed: int
    seconds: float
    home: Path
    control: str = ""
    is_forking: bool = False
    runs_v2: bool = False
    figures: dict[str, Any] = field(default_factory=dict)


async def soak(plan: Plan, bank: Bank) -> Journal:
    """Run it; the journal has what was wrong."""
    plan.home.mkdir(parents=True)
    journal = Journal(plan.home / "events.jsonl")
    with s3_server() as s3, fault_proxy(s3.url) as s3_proxy, local_hub() as hub, fault_proxy(hub.url) as hub_proxy:
        told = _tell_wrongly if plan.control == "wrong-version" else (lambda adapter, version: version)
        world = World(bank, plan.home, s3.bucket("adapters"), hub, told=told)
        await asyncio.to_thread(world.fill)
        target = Target("", "base")
        disk = None if plan.is_forking else interposer(plan.home, plan.home / "store")
        mutant = mutated(plan.control, plan.home / "mutant") if plan.control in MUTANTS else None
        surroundings = Surroundings(
            bank, plan.home, s3, s3_proxy, hub, hub_proxy, plan.is_forking, disk, mutant, plan.runs_v2
        )
        async with Lives(surroundings, target, journal) as lives:
            faults = SourceFaults(plan.seed, {"s3": s3_proxy, "hub": hub_proxy}, hub, world, target, journal)
            await _Soak(plan, world, target, journal, lives, faults, surroundings).run()
        for log in lives.logs:
            check_log(log, journal)
    journal.close()
    return journal


@dataclass
class _Soak:
    _plan: Plan
    _world: World
    _target: Target
    _journal: Journal
    _lives: Lives
    _faults: SourceFaults
    _surroundings: Surroundings

    def __post_init__(self) -> None:
        seed, of, world, journal = self._plan.seed, self._surroundings, self._world, self._journal
        self._disk = FullDisk(seed, of.disk, world, journal)
        self._neighbour = Neighbour(seed, of.env(is_direct=True), of.store_max_bytes, world, journal)
        self._monitor = Monitor(world, self._target, journal, of.store)
        self._operators = [Operator(i, seed, world, self._target, journal) for i in range(OPERATORS + 1)]
        self._quiet: dict[str, Sample] = {}

    async def run(self) -> None:
        plan, done = self._plan, asyncio.Event()
        self._journal.started = time.monotonic()
        self._note_quiet()
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS + IMPATIENT):
                of = Steps if number < CLIENTS else ImpatientSteps
                steps = of(plan.seed, number, self._world, self._target.base)
                group.create_task(run_client(steps, number, self._world, self._target, self._journal, done))
            for operator in self._operators[:OPERATORS]:
                group.create_task(operator.run(done, pause_s=0.4))
            group.create_task(self._faults.run(done, pause_s=5))
            group.create_task(self._disk.run(done, pause_s=45))
            group.create_task(self._neighbour.run(done, pause_s=15))
            group.create_task(ask_again(self._world, self._target, self._journal, done))
            group.create_task(self._watch(done))
            rng = random.Random(plan.seed)
            # The API server first or last, and no source answers meanwhile at one of the two.
            victims = [rng.choice(("EngineCore", "Worker")), "API server"]
            rng.shuffle(victims)
            outage = rng.randrange(2)
            for number, victim in enumerate(victims):
                await self._until(plan.seconds * _KILL_AT[number])
                await self._lives.kill_and_restart(
                    victim, self._world, self._operators[-1], self._faults,
                    self._disk, self._neighbour, rng, in_outage=number == outage,
                )  # fmt: skip
                self._note_quiet()
            await self._until(plan.seconds)
            done.set()
            ended = time.monotonic()
        if time.monotonic() - ended > LONGEST_REQUEST_S:
            self._journal.violation("nothing waits for ever", "the last request or operation")
        self._check_memory()
        await self._audit()
        await self._empty(self._surroundings.store)
        self._plan.figures |= {
            "seconds": plan.seconds, "seed": plan.seed, "clients": CLIENTS, "impatient": IMPATIENT,
            "operators": OPERATORS, "adapters": len(self._world.names), "versions": VERSIONS,
            "most": self._monitor.most, "refusals explained": dict(self._world.oracle.explained.most_common()),
            "a 503 was allowed": self._allowed(),
        }  # fmt: skip

    async def _until(self, up_s: float) -> None:
        """Wait until servers have been up for so long: a slow machine takes longer to start one, and sees as much."""
        await asyncio.sleep(max(0.0, up_s - (self._journal.at_s - self._lives.down_s)))

    def _note_quiet(self) -> None:
        self._lives.processes.sample(self._journal.at_s)
        self._quiet = {name: samples[-1] for name, samples in self._lives.processes.samples.items()}

    async def _watch(self, done: asyncio.Event) -> None:
        looked = printed = time.monotonic()
        while not done.is_set():
            await asyncio.sleep(_SAMPLE_S)
            self._lives.processes.sample(self._journal.at_s)
            now = time.monotonic()
            self._world.oracle.count_allowed(now)
            if now - looked > _LOOK_S:
                looked = now
                await self._monitor.check()
                self._world.oracle.forget(now - 2 * LONGEST_REQUEST_S)
            if now - printed > _PRINT_S:
                printed = now
                resident = {n: s[-1].resident_mb for n, s in self._lives.processes.samples.items() if s}
                print(progress(self._journal, self._monitor.latest, resident, self._plan.seconds), flush=True)

    def _allowed(self) -> str:
        """How much of the time a 503 could have been explained at all."""
        parts = self._world.oracle.allowed_parts()
        most = next(iter(parts.items()), ("nobody", 0.0))
        mean = sum(parts.values()) / len(self._world.names)
        return f"{mean:.1%} of the time for a name on average, {most[1]:.1%} at most, for {most[0]}"

    def _check_memory(self) -> None:
        found = {}
        for name, samples in self._lives.processes.samples.items():
            began, ended = samples[0].at_s, samples[-1].at_s
            warm = [sample for sample in samples if sample.at_s > began + (ended - began) / 3]
            rate = growth_mb_per_min(warm)
            minutes = (warm[-1].at_s - warm[0].at_s) / 60
            found[name] = {
                "growth_mb_per_min": round(rate, 3), "minutes": round(minutes, 1),
                "first_mb": round(warm[0].resident_mb, 1), "last_mb": round(warm[-1].resident_mb, 1),
            }  # fmt: skip
            if rate > MOST_GROWTH_MB_PER_MIN and minutes >= LEAST_MINUTES:
                self._journal.violation("memory is flat", f"{name} grows by {rate:.2f} MB a minute", **found[name])
        self._plan.figures["memory"] = found

    async def _audit(self) -> None:
        """With nobody else about: every name is loaded, at its newest version, and answers with that one only."""
        await asyncio.sleep(SourceUnavailable.retry_after_s)  # for as long an outage is remembered
        began, names = time.monotonic(), iter(self._world.names)
        self._world.oracle.causes.end_all(began)

        async def some() -> None:
            for one in names:
                await self._audit_one(one)

        await asyncio.gather(*(some() for _ in range(4)))
        self._plan.figures["audit_s"] = round(time.monotonic() - began, 1)

    async def _audit_one(self, one: Name) -> None:
        operator, rng = self._operators[-1], random.Random(one.adapter)
        if one.current is None:
            await operator.do("publish", one)
        if one.source != "filesystem" and time.monotonic() - one.appeared < 3:
            await asyncio.sleep(3)  # its absence is remembered
        for kind in ("load", "refresh"):
            await operator.do(kind, one)
        if not one.is_certain:
            self._journal.violation("all is served at the end", "it cannot be loaded", model=one.name)
            return
        route, prompt, tokens = rng.choice(ROUTES), rng.randrange(3), 8
        asked_at = time.monotonic()
        async with connect(self._target.url) as client:
            answer = await ask(client, route, route.body(one.name, prompt, tokens), None)
        asked = Asked(one.name, one.adapter, route.form, prompt, tokens, asked_at, time.monotonic())
        self._journal.write("audit", route.name, answer.status, asked.ended - asked.began, model=one.name)
        wrong = self._world.oracle.judge(asked, answer)
        if wrong is not None or len(self._world.valid(one)) != 1:
            text = wrong or f"valid are {self._world.valid(one)}"
            self._journal.violation("all is served at the end", text, model=one.name)

    async def _empty(self, store: Path) -> None:
        """Unload everything, and count what is left."""
        names = [one for one in self._world.names if not (self._plan.control == "leak" and one.adapter == 0)]
        for one in names:
            await self._operators[-1].do("unload", one)
        left = await check_nothing_is_left(self._target, store, self._journal)
        await asyncio.sleep(6)  # idle connections of clients are closed
        self._lives.processes.sample(self._journal.at_s)
        check_counts(self._lives.processes, self._quiet, self._journal)
        counts = {name: asdict(samples[-1]) for name, samples in self._lives.processes.samples.items()}
        quiet = {name: asdict(sample) for name, sample in self._quiet.items()}
        self._plan.figures |= {"left": left, "at_the_end": counts, "after_the_restart": quiet}
        if ended := self._lives.processes.ended():
            self._journal.violation("the engine lives", f"at the end, these have ended: {ended}")


def _tell_wrongly(adapter: int, version: int) -> int:
    """For a control: what is published of every tenth adapter is another version than the oracle is told."""
    return (version + 1) % VERSIONS if adapter % 10 == 0 else version


def main() -> int:
    """Run one soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, help="what decides everything that is done; a new one by default")
    parser.add_argument("--control", choices=CONTROLS, default="", help="break something: the soak must fail")
    parser.add_argument(
        "--keep", action="store_true", help="write benchmarks/results/soak-<seed>.json, soak-v2-<seed>.json with --v2"
    )
    parser.add_argument("--fork", action="store_true", help="fork servers from one process that has imported vLLM")
    parser.add_argument("--v2", action="store_true", help="run Model Runner V2 with asynchronous scheduling")
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # of clients that leave a proxy
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    print(f"seed {seed}, {options.seconds:.0f} s", flush=True)
    bank = prepare(lambda text: print(text, flush=True))
    home = CACHE / f"seed-{seed}-{int(time.time())}"
    plan = Plan(seed, options.seconds, home, options.control, options.fork, options.v2)
    print(f"events and the servers' logs: {plan.home}", flush=True)
    began = circumstances()
    journal = asyncio.run(_until_ended(plan, bank))
    print(table(journal))
    for name, found in plan.figures.items():
        print(f"{name}: {found}")
    if options.keep:
        print(f"written to {kept(f'v2-{seed}' if options.v2 else f'{seed}', journal, plan.figures, began)}")
    if not journal.violations:
        print(f"seed {seed}: every invariant held")
        return 0
    print(
        f"seed {seed}: {len(journal.violations)} violations; again with --seed {seed} --seconds {options.seconds:.0f}"
    )
    for found in journal.violations[:20]:
        print(f"  {found['at_s']:.1f} s, {found['invariant']}: {found['text']}")
    return 1


async def _until_ended(plan: Plan, bank: Bank) -> Journal:
    """A soak that ends its servers too where it is ended itself."""
    running = asyncio.create_task(soak(plan, bank))
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has its background jobs ignore the first
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    return await running


if __name__ == "__main__":
    sys.exit(main())
