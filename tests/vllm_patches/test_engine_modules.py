"""An adapter's names are read by vLLM's own function with the model's own mapping, sent as plain values."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from types import SimpleNamespace

import pytest

from lora_plugins.adapter.model_modules import ModelModules
from lora_plugins.vllm_patches import engine_modules
from lora_plugins.worker.model_description import _renames
from tests.make import LAYER, MODULES, PEFT
from tests.make import read_name as as_tests_read

NAMES = [
    f"{PEFT}{LAYER.format(0, 'q_proj')}.lora_A.weight",
    f"{PEFT}{LAYER.format(0, 'q_proj')}.lora_B.weight",
    f"{PEFT}model.embed_tokens.lora_embedding_A",
    "model.layers.0.mlp.down_proj.lora_B.weight",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_without_mapping_are_read_as_tests_read_them(name):
    assert engine_modules.reader_of_names(MODULES)(name) == as_tests_read(name)


def mappers():
    from vllm.model_executor.models import bert, gpt2, llama, modernbert
    from vllm.model_executor.models.utils import WeightsMapper

    own = WeightsMapper(
        orig_to_new_regex={re.compile(r"\.h\.(\d+)\.", re.IGNORECASE): r".layers.\1."},
        orig_to_new_substr={".attention.": ".self_attn."},
        orig_to_new_prefix={"model.": "language_model.model."},
        orig_to_new_suffix={".out": ".o_proj"},
    )
    kinds = [kind for module in (bert, gpt2, llama, modernbert) for kind in vars(module).values()]
    vllms = [mapper for kind in kinds if isinstance(mapper := getattr(kind, "hf_to_vllm_mapper", None), WeightsMapper)]
    assert len(vllms) > 5
    return [own, None, *vllms]


def test_a_mapping_reads_names_alike_after_it_was_sent():
    from vllm.lora.utils import parse_fine_tuned_lora_name

    for mapper in mappers():
        model = SimpleNamespace(hf_to_vllm_mapper=mapper)
        sent = ModelModules.of_plain(
            json.loads(json.dumps(dataclasses.replace(MODULES, renames=_renames(model)).plain()))
        )
        vllms = None if mapper is None else mapper.get_rename_mapper()
        names = [
            *NAMES,
            f"{PEFT}model.h.3.attention.q.lora_A.weight",
            f"{PEFT}roberta.encoder.layer.0.attention.self.query.lora_A.weight",
        ]
        for name in names:
            assert engine_modules.reader_of_names(sent)(name) == parse_fine_tuned_lora_name(name, vllms)


def halves_of(modules: ModelModules) -> list[ModelModules]:
    items = list(modules.places.items())
    return [dataclasses.replace(modules, places=dict(part)) for part in (items[:3], items[3:])]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_answers_of_pipeline_stages_are_joined_and_told(stages):
    answers = halves_of(MODULES) if stages == 2 else [MODULES, MODULES]
    told = []

    async def collective_rpc(method, args=()):
        if method == engine_modules.TELL_METHOD:
            told.extend(args)
            return [None] * len(answers)
        assert method == engine_modules.METHOD
        return [answer.plain() for answer in answers]

    assert asyncio.run(engine_modules.ask_engine(SimpleNamespace(collective_rpc=collective_rpc))) == MODULES
    assert told == ([MODULES.plain()] if stages == 2 else [])


def test_a_worker_keeps_the_whole_model_that_it_is_told():
    from vllm.v1.worker.worker_base import WorkerBase

    engine_modules.patch()
    worker = WorkerBase.__new__(WorkerBase)
    worker.model_runner = SimpleNamespace(lora_manager=SimpleNamespace())
    getattr(worker, engine_modules.TELL_METHOD)(MODULES.plain())
    assert worker.model_runner.lora_manager.whole_model == MODULES
    worker.model_runner = SimpleNamespace()
    getattr(worker, engine_modules.TELL_METHOD)(MODULES.plain())
    assert getattr(worker, engine_modules.METHOD)() is None, "without LoRA"


def test_an_engine_without_lora_has_no_modules():
    async def collective_rpc(_):
        return [None]

    assert asyncio.run(engine_modules.ask_engine(SimpleNamespace(collective_rpc=collective_rpc))) is None


def test_transformers_renames_a_model_in_both_directions():
    old, new = "model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.gate"
    forward, back = engine_modules.respellings_of(dataclasses.replace(MODULES, model_type="mixtral"))
    assert (forward(old), back(new)) == (new, old)
    other = "model.layers.0.self_attn.q_proj"
    assert forward(other) == back(other) == other


def test_a_model_that_transformers_does_not_rename_has_one_spelling():
    assert engine_modules.respellings_of(dataclasses.replace(MODULES, model_type="llama")) == ()
    assert engine_modules.respellings_of(dataclasses.replace(MODULES, model_type="of nobody")) == ()
