"""VLLM's real scheduler beside a model runner that makes tokens up, and workers that carry commands out at once."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.scheduler.messages import (
    Activate,
    Activated,
    Command,
    Evict,
    Failed,
    Load,
    Loaded,
    Move,
    Report,
    Slots,
)
from lora_plugins.vllm_patches.engine_core import engine_planner
from lora_plugins.vllm_patches.engine_core.request import CLIENT
from lora_plugins.vllm_patches.engine_core.scheduler import with_admission
from lora_plugins.vllm_patches.message_fields import attach_reports, commands_of
from testbed.model_kinds import ask_in_this_process

BLOCK = 16
STEP_S = 0.002
# Parts of a client's request: `0_CLIENT` of several choices, and tokens of beams.
_PART = re.compile(r"(?:\d+_(?P<of_choice>.+)|(?P<of_beam>.+)-[0-9a-f]{16}-beam-.+)")


def vllm_config(
    base: Path,
    *,
    max_loras: int = 1,
    max_cpu_loras: int | None = None,
    is_async: bool = False,
    policy: str = "fcfs",
    lora: bool = True,
    **transfers: Any,
) -> Any:
    """`transfers`: `kv_transfer_config` and `ec_transfer_config` of vLLM's."""
    import torch
    from vllm.config import CacheConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig

    ask_in_this_process()
    model = ModelConfig(str(base), skip_tokenizer_init=True, dtype="float32", max_model_len=64)
    scheduler = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        is_encoder_decoder=False,
        policy=policy,
        async_scheduling=is_async,
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
    cache.kv_cache_layout = "NHD"  # which the engine core resolves before it makes a KV cache
    places = max_cpu_loras or max(2, max_loras)
    loras = LoRAConfig(max_lora_rank=8, max_loras=max_loras, max_cpu_loras=places, lora_dtype=torch.float32)
    config = VllmConfig(
        model_config=model,
        lora_config=loras if lora else None,
        scheduler_config=scheduler,
        cache_config=cache,
        **transfers,
    )
    config.scheduler_config.async_scheduling = is_async  # which vLLM switches off where a platform has none
    return config


def make_scheduler(
    config: Any,
    kind: type | None = None,
    *,
    blocks: int = 64,
    include_finished_set: bool = False,
    slots: Slots | None = None,
) -> Any:
    """The class that this configuration names, or `kind`; `slots`: other than those of configuration and kernels."""
    import torch
    from vllm.v1.engine import core
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = config.cache_config.num_gpu_blocks_override = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    (cache,) = core.get_kv_cache_configs(config, [{"layer": spec}], [1 << 30])
    kind = kind or with_admission(config.scheduler_config.get_scheduler_cls())
    of_kernels = engine_planner.slots_of
    with patch.object(engine_planner, "slots_of", of_kernels if slots is None else lambda *_: slots):
        return kind(
            config,
            cache,
            StructuredOutputManager(config),
            BLOCK,
            BLOCK,
            include_finished_set=include_finished_set,
            log_stats=True,
        )


def adapter(number: int) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, f"/store/{number}")


def request(name: str, lora: int | None = None, *, tokens: int = 3, prompt: int = 4, **more: Any) -> Any:
    """A request; the header of a part (`_PART`) names the client's request, as from vLLM's engine client."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = None if "pooling_params" in more else SamplingParams(max_tokens=tokens, ignore_eos=True)
    if sampling is not None:
        sampling.update_from_generation_config({}, 2)
    part = _PART.fullmatch(name)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(3, 3 + prompt)),
        sampling_params=sampling,
        lora_request=None if lora is None else adapter(lora),
        trace_headers=None if part is None else {CLIENT: part["of_choice"] or part["of_beam"]},
        **({"pooling_params": None} | more),
    )


def make_keys() -> None:
    """Choose the root of the keys of prefix caches: once for an engine, or its requests share no prefix."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)


def request_with_path(name: str, path: str, lora: int = 7, *, token_ids: list[int] | None = None, **more: Any) -> Any:
    """A request for the version at a path, with keys for the prefix cache (`make_keys`), perhaps of these tokens."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    one = request(name, lora, block_hasher=get_request_block_hasher(BLOCK, sha256), **more)
    one.lora_request.lora_path = path
    if token_ids is not None:
        one.prompt_token_ids[:] = one._all_token_ids[:] = token_ids
    one.block_hashes.clear()  # which `Request` makes of prompt and path
    one.update_block_hashes()
    return one


class Engine:
    """Steps of an engine, `lag` of them under way at a time.

    Attributes:
        commands: all that the workers were sent. fails: errors of adapters that cannot be loaded, by id.
        outputs: all that clients were sent, in order, with the step. sent: all that the workers were sent.
        in_memory: adapters that the workers have. Each request that is scheduled must find its own there.
        known: requests for which a worker keeps a place (vllm/v1/worker/gpu/model_runner.py has one for each).
    """

    def __init__(self, scheduler: Any, *, is_instant: bool = True, lag: int = 0) -> None:
        self.scheduler = scheduler
        self.commands: list[Command] = []
        self.fails: dict[int, LoRAPluginsError] = {}
        self.holds_back = False  # workers that have not done anything yet
        self.outputs: list[Any] = []
        self.sent: list[Any] = []
        self.finished: list[set[str]] = []
        self.in_memory: set[int] = set()
        self.known: set[str] = set()
        self.stats: Any = None
        self._is_instant = is_instant
        self._lag = lag
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._reports: list[Report] = []

    def add(self, one: Any, lora: int | None = None, **more: Any) -> Any:
        """Have a request arrive, or one made of its name, adapter and options; returns the request."""
        asked = request(one, lora, **more) if isinstance(one, str) else one
        self.scheduler.add_request(asked)
        return asked

    def begin(self, one: Any, lora: int | None = None, **more: Any) -> Any:
        """Have a request arrive, and step until its first token."""
        asked = self.add(one, lora, **more)
        self.step_until(lambda: bool(self.tokens_of(asked.request_id)))
        return asked

    def answer(self, one: Any, lora: int | None = None, **more: Any) -> Any:
        """Have a request arrive, and step until nothing is to be done."""
        asked = self.add(one, lora, **more)
        self.run()
        return asked

    def step_until(self, is_reached: Callable[[], bool], steps: int = 200) -> None:
        for _ in range(steps):
            if is_reached():
                return
            self.step()
        raise AssertionError("it does not go on")

    def step(self) -> dict[str, int]:
        """Schedule once; returns the tokens of each request that are computed in this step."""
        output = self.scheduler.schedule()
        self.sent.append(output)
        self._obey(commands_of(output))
        self._check_adapters(output)
        self._check_places(output)
        self._under_way.append((output, self._run(output)))
        if len(self._under_way) > self._lag:
            self._update()
        return dict(output.num_scheduled_tokens)

    def drain(self) -> None:
        while self._under_way:
            self._update()

    def _update(self) -> None:
        output, made = self._under_way.popleft()
        for of_client in self.scheduler.update_from_output(output, made).values():
            self.outputs += of_client.outputs
            if of_client.finished_requests:
                self.finished.append(set(of_client.finished_requests))
            self.stats = of_client.scheduler_stats or self.stats

    def run(self, steps: int = 200) -> None:
        """Until nothing is to be done."""
        for _ in range(steps):
            if not self.scheduler.has_requests():
                self.drain()
                if not self.scheduler.has_requests():
                    return
            self.step()
        raise AssertionError("it does not come to rest")

    def tokens_of(self, name: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == name for token in output.new_token_ids]

    def end_of(self, name: str) -> Any:
        return next(one for one in self.outputs if one.request_id == name and one.finish_reason is not None)

    @property
    def gone(self) -> list[str]:
        """The requests that workers were told to forget, each as often as they were."""
        return [name for output in self.sent for name in sorted(output.finished_req_ids)]

    def _check_adapters(self, output: Any) -> None:
        """No batch has a request whose adapter the workers lack; with vLLM's own class they load it themselves."""
        if getattr(self.scheduler, "planner", None) is not None:
            loras = (self.scheduler.requests[name].lora_request for name in output.num_scheduled_tokens)
            assert {lora.lora_int_id for lora in loras if lora is not None} <= self.in_memory

    def _check_places(self, output: Any) -> None:
        self.known -= output.finished_req_ids | (output.preempted_req_ids or set())
        self.known |= {new.req_id for new in output.scheduled_new_reqs}
        self.known |= output.scheduled_cached_reqs.resumed_req_ids
        assert len(self.known) <= self.scheduler.max_num_running_reqs

    def _obey(self, commands: Any) -> None:
        for command in commands:
            self.commands.append(command)
            if isinstance(command, Evict):
                self.in_memory.discard(command.key)
            if isinstance(command, Move):
                self.in_memory.remove(command.source)
                self.in_memory.add(command.key)
            if isinstance(command, Load) and (error := self.fails.get(command.spec.engine_id)) is not None:
                self._reports.append(Failed(command.job, error))
            elif isinstance(command, Load):
                self.in_memory.add(command.key)
                self._reports.append(Loaded(command.job, 100, self._is_instant, 0.01, rank=8))
            elif isinstance(command, Activate) and command.job is not None:
                self._reports.append(Activated(command.job, 0.01))

    def _run(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            of = self.scheduler.requests[name]
            is_done = of.num_computed_tokens >= of.num_tokens + max(0, of.num_output_placeholders - 1)
            sampled.append([5 + (len(name) + of.num_computed_tokens) % 50] if is_done else [])
        made = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        if self._reports and not self.holds_back:
            attach_reports(made, self._reports)
            self._reports = []
        return made


class Clock:
    """The time of all processes' clocks that never go back; it passes when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def step(self, engine: Engine, seconds: float = STEP_S) -> dict[str, int]:
        """One step of an engine that takes so long."""
        scheduled = engine.step()
        self.now += seconds
        return scheduled


Make = Callable[..., Engine]  # the fixture `make_engine`
