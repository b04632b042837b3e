"""TRL's and OpenRLHF's form: no adapter comes to vLLM; it is merged into the base model's weights, which are pushed."""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testbed.frameworks.engines import Engine, Offline, Said, text_of
from testbed.frameworks.packages import FOLDER
from testbed.frameworks.versions import MAX_TOKENS, PROMPT, Files
from testbed.reference import Reference


class WithoutLoRA(Offline):
    """`LLM` as these frameworks start it."""

    def __init__(self, **settings: Any) -> None:
        self.base = Path(settings["model"])
        super().__init__(**{name: value for name, value in settings.items() if "lora" not in name})


@contextmanager
def loadable_again(engine: Offline) -> Iterator[Any]:
    """The engine's model; on CPUs vLLM has packed its weights, and only its own reload takes them apart."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = engine.engine.model_executor.driver_worker.model_runner
    with set_current_vllm_config(runner.vllm_config):
        initialize_layerwise_reload(runner.model)
        yield runner.model
        finalize_layerwise_reload(runner.model, runner.model_config)


async def merged_weights(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    assert isinstance(engine, WithoutLoRA)
    yield "base", await engine.ask(None)
    for version in ("v1", "v2"):
        merged = Reference(engine.base).load(Path(files.of(version))).merge_and_unload()
        with loadable_again(engine) as model:
            model.load_weights(merged.state_dict().items())
        await engine.call("reset_prefix_cache")
        yield version, await engine.ask(None)


class OfTRL(Offline):
    """TRL's own class for generation, which makes an `LLM` in the trainer's process."""

    def __init__(self, **settings: Any) -> None:
        sys.path.append(str(FOLDER))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        from accelerate import Accelerator
        from trl.generation import vllm_generation

        # It has no settings for these: compiling takes minutes here, and PEFT computes in float32.
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True, dtype="float32")
        self.reference = Reference(Path(settings["model"]))
        self.trl = vllm_generation.VLLMGeneration(
            self.reference.load(None), Accelerator(cpu=True), self.reference.tokenizer, max_model_length=1000,
            max_num_seqs=16, max_completion_length=MAX_TOKENS, temperature=0, generation_kwargs={"ignore_eos": True},
        )  # fmt: skip
        Engine.__init__(self, self.trl.llm.llm_engine)

    def generate(self) -> Said:
        try:
            return list(self.trl.generate([PROMPT], None, 1)[1][0])
        except Exception as error:
            return text_of(error)


async def trl_merges(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    assert isinstance(engine, OfTRL)
    yield "base", engine.generate()
    for version in ("v1", "v2"):
        engine.trl.model = engine.reference.load(Path(files.of(version)))
        with loadable_again(engine):
            engine.trl.sync_weights()
        yield version, engine.generate()
