"""Goal of R34, R46 and R50 over time (docs/reference/deployments.md#the-soak): `make soak`.

`python -m benchmarks.soak --seconds 1800 --seed 7`; exits with 1 where an invariant did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import time

from benchmarks.record import circumstances
from benchmarks.soak.bank import CACHE, Bank, prepare
from benchmarks.soak.journal import Journal, kept, table
from benchmarks.soak.run import CONTROLS, Plan, soak


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
