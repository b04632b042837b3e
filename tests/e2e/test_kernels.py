"""`lora_kernels` alone on the real engine: every row of a mixed batch is PEFT's, base rows included."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lora_plugins.kernels.compiled import build
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete_all
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import Server
from tests.e2e.servers import KERNELS, lora_server

NAMES = [spec.name for spec in DEMO_ADAPTERS]
SLOTS = 4  # fewer than adapters: slots are written again, with other ranks
PREFILL = " ".join([PROMPT] * 6)


@dataclass(frozen=True)
class Kernels:
    server: Server
    bed: Bed


@pytest.fixture(scope="module")
def kernels(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    arguments = (
        *("--max-loras", str(SLOTS), "--max-cpu-loras", "8"),
        *("--served-model-name", "base", "--no-enable-prefix-caching"),
        *("--lora-modules", *(f"{name}={bed.adapters / name}" for name in NAMES)),
    )
    home = tmp_path_factory.mktemp("kernels")
    with lora_server(bed, home, *arguments, plugins=[KERNELS]) as server:
        yield Kernels(server, bed)


def ask(kernels: Kernels, models: list[str], prompt: str = PROMPT) -> list[list[int] | int]:
    """The greedy answers of all these models at once, in one batch or as many as the slots allow."""
    return asyncio.run(complete_all(kernels.server, models, prompt, MAX_TOKENS))


def expected(kernels: Kernels, models: list[str]) -> list[list[int]]:
    return [kernels.bed.answers[None if model == "base" else model] for model in models]


def test_the_engine_computes_with_our_kernels(kernels: Kernels) -> None:
    wrapper = "PunicaWrapperCPU" if build.problem() else "CompiledPunicaWrapperCPU"
    assert f"Using {wrapper}" in kernels.server.log()


def test_more_adapters_than_slots_with_base_rows(kernels: Kernels) -> None:
    models = ["base", *NAMES] * 5
    assert ask(kernels, models) == expected(kernels, models)


def test_a_slot_reused_by_another_rank_has_no_stale_rows(kernels: Kernels) -> None:
    # "wide" has rank 64 in all modules; the others have 8 and 16 in fewer, and take its slots in turn.
    for name in ["wide", "sql", "chat", "stable", "team/poet", "wide", "team/poet", "sql", "stable", "chat"]:
        assert ask(kernels, [name, "base"]) == expected(kernels, [name, "base"])


def test_long_prompts_of_several_adapters(kernels: Kernels, reference_of_prefill: dict[str, list[int]]) -> None:
    models = ["base", *NAMES[:SLOTS]] * 2
    assert ask(kernels, models, PREFILL) == [reference_of_prefill[model] for model in models]


@pytest.fixture(scope="module")
def reference_of_prefill(kernels: Kernels) -> dict[str, list[int]]:
    from testbed.reference import Reference

    reference = Reference(kernels.bed.base)
    ids = reference.prompt_ids(PREFILL)
    answers = {name: reference.generate(kernels.bed.adapters / name, ids, MAX_TOKENS) for name in NAMES[:SLOTS]}
    return {"base": reference.generate(None, ids, MAX_TOKENS), **answers}
