"""TRL's and OpenRLHF's form: no adapter comes to vLLM; it is merged into the base model's weights, which are pushed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from testbed.bed import CACHE
from testbed.frameworks.engines import Engine, Offline, Said, text_of
from testbed.frameworks.versions import MAX_TOKENS, PROMPT, Files
from testbed.reference import Reference

# `pip install --target` there, without dependencies: trl datasets pandas pyarrow dill multiprocess xxhash
TRL = CACHE.parent / "frameworks" / "trl"


class WithoutLoRA(Offline):
    """`LLM` as these frameworks start it."""

    def __init__(self, **settings: Any) -> None:
        self.base = Path(settings["model"])
        super().__init__(**{name: value for name, value in settings.items() if "lora" not in name})


async def merged_weights(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    assert isinstance(engine, WithoutLoRA)
    model = engine.engine.model_executor.driver_worker.model_runner.model
    yield "base", await engine.ask(None)
    for version in ("v1", "v2"):
        merged = Reference(engine.base).load(Path(files.of(version))).merge_and_unload()
        model.load_weights(merged.state_dict().items())
        await engine.call("reset_prefix_cache")
        yield version, await engine.ask(None)


class OfTRL(Offline):
    """TRL's own class for generation, which makes an `LLM` in the trainer's process."""

    def __init__(self, **settings: Any) -> None:
        sys.path.append(str(TRL))
        from accelerate import Accelerator
        from trl.generation.vllm_generation import VLLMGeneration

        self.reference = Reference(Path(settings["model"]))
        self.trl = VLLMGeneration(
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
        engine.trl.sync_weights()
        yield version, engine.generate()
