"""Adapters whose slot a step could not write, over vLLM's real scheduler: their requests end, all others run on."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import FinishReason

from lora_plugins.errors import OutOfMemory
from lora_plugins.scheduler.messages import Activate, Evict, Failed, Load
from lora_plugins.vllm_patches.message_fields import error_in
from tests.vllm_patches.engine_bed import Engine, Make


def losing(engine: Engine, engine_id: int) -> Engine:
    """The next slot of this adapter cannot be written before its step."""
    obey, keys = engine._obey, dict[int, int]()

    def losing_once(commands: Any) -> None:
        obey(commands)
        keys.update({it.key: it.spec.engine_id for it in commands if isinstance(it, Load)})
        for command in commands:
            if isinstance(command, Activate) and command.job is None and keys.pop(command.key, 0) == engine_id:
                engine._obey = obey  # type: ignore[method-assign]
                engine._reports.append(Failed(0, OutOfMemory("no room", adapter="adapter-1"), command.key))

    engine._obey = losing_once  # type: ignore[method-assign]
    return engine


def test_only_the_requests_of_a_lost_adapter_end(make_engine: Make) -> None:
    engine = losing(make_engine(max_loras=2), 1)
    for name, lora in (("lost", 1), ("good", 2), ("of-base", None)):
        engine.add(name, lora, tokens=5)
    engine.run()
    end = engine.end_of("lost")
    assert (end.finish_reason, engine.tokens_of("lost")) == (FinishReason.ERROR, [])
    error = error_in(end.stop_reason)
    assert error is not None
    assert (error.code, error.adapter) == ("L004", "adapter-1")
    assert [len(engine.tokens_of(name)) for name in ("good", "of-base")] == [5, 5]
    assert [it.key for it in engine.commands if isinstance(it, Evict)] == [1]
    engine.answer("later", 1, tokens=5)
    assert len(engine.tokens_of("later")) == 5, "loaded again"
    assert not engine.scheduler.planner.state.of_request
