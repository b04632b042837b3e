"""Which version `lora_versions` names for each token, against the weights that made the token.

VLLM's real scheduler of each kind, and made-up workers that carry commands out batch by batch, as both runners do, and
sample a token that says whose weights they have. Moves, lengths and rejected drafts are random.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lora_plugins.scheduler.messages import AdapterSpec, Load, Move
from tests.repetitions import times
from tests.vllm_patches.engine_bed import Engine, make_keys, make_scheduler, request_with_path, vllm_config
from tests.worker.small_model import base_directory

PATHS = ["/store/" + f"{number}" * 64 for number in range(1, 4)]
TOKENS = 24
WORLDS = times(8, short=4)


class Case(NamedTuple):
    """`lag`: batches under way beside the scheduled batch. `accepts`: drafts that vLLM accepts, of so many."""

    is_async: bool
    lag: int
    drafts: int = 0
    accepts: Callable[[random.Random, int], int] = lambda rng, count: rng.randint(0, count)
    requests: int = 3
    blocks: int = 64
    resets: bool = False


# Without drafts, and with fewer batches under way, `test_random_worlds.py` compares each token.
CASES = {
    "two stages": Case(is_async=False, lag=1),
    "two stages, asynchronous": Case(is_async=True, lag=2),
    "n-grams": Case(is_async=False, lag=0, drafts=3),
    "drafts, none rejected": Case(is_async=True, lag=1, drafts=3, accepts=lambda rng, count: count),
    "drafts, some rejected": Case(is_async=True, lag=1, drafts=3),
    "preemptions, two stages": Case(is_async=True, lag=2, requests=4, blocks=6),
    "resets, two stages": Case(is_async=True, lag=2, resets=True),
}


class TellingEngine(Engine):
    """Samples tokens that say which of `PATHS` the workers had when they executed the batch."""

    def __init__(self, scheduler: Any, case: Case, rng: random.Random) -> None:
        super().__init__(scheduler, lag=case.lag)
        self._case, self._rng = case, rng
        self._paths: dict[int, str] = {}

    def _obey(self, commands: Any) -> None:
        for command in commands:
            if isinstance(command, Load):
                self._paths[command.key] = command.spec.path
            if isinstance(command, Move):
                self._paths[command.key] = self._paths.pop(command.source)
        super()._obey(commands)

    def _run(self, output: Any) -> Any:
        made = super()._run(output)
        for row, name in enumerate(made.req_ids):
            request = self.scheduler.requests[name]
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            accepted = self._case.accepts(self._rng, drafts) if drafts else 0
            token = PATHS.index(self._paths[request.lora_request.lora_int_id])
            made.sampled_token_ids[row] = [] if request.is_prefill_chunk else [token] * (1 + accepted)
        return made


def engine_of(case: Case, base: Path, rng: random.Random) -> TellingEngine:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    more = {}
    if case.drafts:
        more["speculative_config"] = SpeculativeConfig(
            method="ngram_gpu" if case.is_async else "ngram",
            num_speculative_tokens=case.drafts,
            prompt_lookup_max=4,
            prompt_lookup_min=2,
            target_model_config=ModelConfig(str(base), skip_tokenizer_init=True, dtype="float32", max_model_len=64),
            target_parallel_config=ParallelConfig(),
        )
    options = vllm_config(base, is_async=case.is_async, max_loras=2, max_cpu_loras=4, **more)
    options.cache_config.enable_prefix_caching = True
    make_keys()
    return TellingEngine(make_scheduler(options, blocks=case.blocks), case, rng)


def named(said: list[tuple[str, int]], position: int) -> int:
    """The version of a token: the last whose first token is not after the token."""
    return int([digest for digest, begins_at in said if begins_at <= position][-1][0]) - 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_token_is_named_after_its_weights(case: Case, tmp_path: Path) -> None:
    moved, base = 0, base_directory(tmp_path)
    for seed in range(WORLDS):
        rng = random.Random(seed)
        engine = engine_of(case, base, rng)
        names = [f"request-{number}" for number in range(case.requests)]
        for name in names:
            engine.add(request_with_path(name, PATHS[0], tokens=TOKENS, prompt=rng.randint(4, 20)))
        loads = dict(zip(sorted(rng.sample(range(2, 20), 2)), PATHS[1:], strict=True))
        sent = 0
        for step in range(400):
            if (path := loads.get(step)) is not None:
                spec = AdapterSpec(7, "adapter-7", path, size_bytes=100)
                engine.scheduler.planner.load(spec, time.monotonic(), moves=True)
            if engine.scheduler.has_requests():
                engine.step()
            if case.resets and sent < (sent := sum(isinstance(command, Move) for command in engine.commands)):
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.drain()
        for name in names:
            tokens = engine.tokens_of(name)
            said = (engine.end_of(name).kv_transfer_params or {}).get("lora_versions") or [("1" * 64, 0)]
            moved += len(said) > 1
            assert [begins_at for _, begins_at in said] == sorted(begins_at for _, begins_at in said), (seed, name)
            assert [named(said, position) for position in range(len(tokens))] == tokens, (seed, name, said)
    assert moved >= WORLDS
