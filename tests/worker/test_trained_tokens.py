"""Rows of trained tokens take the place of the embedding's and the head's, in rows of their own adapter alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_plugins.adapter.model_modules import TokenPlaces
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter
from lora_plugins.worker.prompt_rows import rows_of_batch
from lora_plugins.worker.token_layers import find
from lora_plugins.worker.token_rows import TokenRows
from lora_plugins.worker.weights_file import patch_safetensors
from tests.worker import small_model
from tests.worker.small_model import WIDTH, Adapter, Make, evict, failure, make_adapter, serve, step
from tests.worker.test_fits import WORDS, model_with_words

DELTA = "base_model.model.{}.token_adapter.trainable_tokens_delta"
EMBEDDING, HEAD = DELTA.format("embed_tokens"), DELTA.format("lm_head")
IDS = [9, 3]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Changes of the model and of its configuration, before a manager is made."""
    from vllm.lora import lora_model

    changes = SimpleNamespace(of_model=lambda _: None, is_tied=False, scale=lambda hidden: hidden)

    def changed() -> Any:
        made = model_with_words()
        made.embed_tokens.weight.data.normal_(generator=torch.Generator().manual_seed(1))
        made.lm_head.weight.data.normal_(generator=torch.Generator().manual_seed(2))
        type(made).compute_logits = lambda self, hidden: self.logits_processor(self.lm_head, changes.scale(hidden))
        made.lm_head.cpu_linear = torch.nn.functional.linear  # as vLLM sets once weights are loaded
        changes.of_model(made)
        return made

    configure = small_model.vllm_config

    def configured(*args: Any, **kwargs: Any) -> Any:
        config = configure(*args, **kwargs)
        config.model_config.hf_text_config.tie_word_embeddings = changes.is_tied
        return config

    monkeypatch.setattr(lora_model, "safetensors", lora_model.safetensors)  # to be put back
    patch_safetensors()
    monkeypatch.setattr(small_model, "small_model", changed)
    monkeypatch.setattr(small_model, "vllm_config", configured)
    return changes


def rows(seed: int, count: int = len(IDS), features: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed))


def adapter(directory: Path, number: int, ids: Any = None, **tensors: torch.Tensor) -> Adapter:
    """A plain adapter, or one with these ids and rows, which stand for `embed_tokens` and `lm_head`."""
    names = {"embedding": EMBEDDING, "head": HEAD}
    change = {names[one]: it for one, it in tensors.items()}
    return make_adapter(directory / str(number), number, change=change, trainable_token_indices=ids)


def embedded(manager: Any, *ids: int) -> torch.Tensor:
    """What the model's embedding returns for a batch of these tokens."""
    found: torch.Tensor = manager._adapter_manager.model.embed_tokens(torch.tensor(ids))
    return found


def logits(manager: Any, hidden: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = manager._adapter_manager.model.compute_logits(hidden)
    return found


def of_base(manager: Any) -> tuple[torch.Tensor, torch.Tensor]:
    model = manager._adapter_manager.model
    return model.embed_tokens.base_layer.weight[:WORDS], model.lm_head.weight[:WORDS]


@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_replace_those_of_their_own_adapter(
    make_manager: Make, model: Any, kernels: str, tmp_path: Path, is_tied: bool
) -> None:
    model.is_tied = is_tied
    manager = make_manager(slots=3)
    one, other = adapter(tmp_path, 1, IDS, embedding=rows(1)), adapter(tmp_path, 2, [3, 40], embedding=rows(2))
    plain = adapter(tmp_path, 3)
    for slot, it in enumerate((one, other, plain)):
        serve(manager, it, slot)
    weight, head = of_base(manager)
    step(manager, one, other, plain, one)
    wanted = torch.stack([rows(1)[1], rows(2)[0], weight[3], rows(1)[0]])
    assert torch.equal(embedded(manager, 3, 3, 3, 9), wanted)
    assert torch.equal(embedded(manager, 40, 40, 9, 40), torch.stack([weight[40], rows(2)[1], weight[9], weight[40]]))
    hidden = rows(5, 4)
    wanted = hidden @ head.T
    if is_tied:
        wanted[0, IDS], wanted[3, IDS], wanted[1, [3, 40]] = (
            rows(1) @ hidden[0], rows(1) @ hidden[3], rows(2) @ hidden[1],
        )  # fmt: skip
    assert torch.allclose(logits(manager, hidden), wanted, atol=1e-5)


def test_a_head_has_rows_of_its_own(make_manager: Make, model: Any, tmp_path: Path) -> None:
    model.is_tied = True
    manager = make_manager()
    ids = {"embed_tokens": IDS, "lm_head": [7]}
    serve(manager, made := adapter(tmp_path, 1, ids, embedding=rows(1), head=rows(2, 1)), 0)
    step(manager, made)
    hidden = rows(5, 1)
    wanted = hidden @ of_base(manager)[1].T
    wanted[0, 7] = rows(2, 1)[0] @ hidden[0]
    assert torch.allclose(logits(manager, hidden), wanted, atol=1e-5)
    assert torch.equal(embedded(manager, 9)[0], rows(1)[0])


def test_any_write_of_a_slot_takes_its_rows_away(make_manager: Make, model: Any, tmp_path: Path) -> None:
    model.is_tied = True
    manager = make_manager(slots=1)
    serve(manager, made := adapter(tmp_path, 1, IDS, embedding=rows(1)), 0)
    evict(manager, made)
    serve(manager, plain := adapter(tmp_path, 2), 0)
    step(manager, plain)
    weight, head = of_base(manager)
    hidden = rows(5, 1)
    assert torch.equal(embedded(manager, 9)[0], weight[9])
    assert torch.allclose(logits(manager, hidden), hidden @ head.T, atol=1e-5)


def test_adapters_that_vllm_adds_have_no_rows(make_manager: Make, model: Any, tmp_path: Path) -> None:
    manager = make_manager(slots=1)
    tokens = manager._adapter_manager.trained_tokens
    tokens._tables[0].write(torch.tensor(sorted(IDS)), rows(1), 0)
    manager.add_dummy_lora(adapter(tmp_path, 1).request(), 4)
    manager._adapter_manager.activate_adapter(1)
    assert not tokens._tables[0].counts


def test_slots_are_whole_after_the_devices_memory_was_lost(make_manager: Make, model: Any, tmp_path: Path) -> None:
    manager = make_manager(slots=2)
    serve(manager, made := adapter(tmp_path, 1, IDS, embedding=rows(1)), 0)
    serve(manager, plain := adapter(tmp_path, 2), 1)
    for table in manager._adapter_manager.trained_tokens._tables:
        table.keys[len(table.keys) // 2] = WORDS + 1 + 3  # as if the second slot had a row of token 3
        table.rows.normal_()
    manager.rewrite_slots()
    step(manager, made, plain)
    assert torch.equal(embedded(manager, 3, 3), torch.stack([rows(1)[1], of_base(manager)[0][3]]))


def test_other_slots_have_their_rows_while_one_is_written() -> None:
    """In each moment of a write by a background thread or a stream."""
    table = TokenRows(3, TokenPlaces("e", "", WORDS, WIDTH, 4, is_tied=False), torch.float32, "cpu")
    for slot in (0, 2):
        table.write(torch.tensor([3, 50]), rows(slot), slot)
    ids, slots = torch.tensor([3, 50, 3, 50, 9]), torch.tensor([0, 0, 2, 2, 2])
    wanted = torch.cat([rows(0), rows(2), torch.zeros(1, WIDTH)])
    moments = []

    class AfterEach(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            moments.append(torch.equal(table.replaced(torch.zeros(5, WIDTH), ids, slots), wanted))
            return made

    with AfterEach():
        table.write(torch.tensor([1, 2, 5]), rows(7, 3), 1)
        table.write(torch.tensor([9]), rows(8, 1), 1)
        table.clear(1)
    assert len(moments) > 10
    assert all(moments)


def test_rows_are_scaled_where_the_embedding_scales(make_manager: Make, model: Any, tmp_path: Path) -> None:
    def scaling(made: Any) -> None:
        made.embed_tokens.embed_scale = 4.0

    model.of_model, model.is_tied = scaling, True
    manager = make_manager()
    serve(manager, made := adapter(tmp_path, 1, IDS, embedding=rows(1)), 0)
    step(manager, made)
    hidden = rows(5, 1)
    assert torch.equal(embedded(manager, 9)[0], 4 * rows(1)[0])
    assert torch.allclose(logits(manager, hidden)[0, IDS], rows(1) @ hidden[0], atol=1e-5)


def test_a_graph_made_once_reads_what_is_written_later(make_manager: Make, model: Any, tmp_path: Path) -> None:
    def without_lora(made: Any) -> None:  # as in most models; vLLM's own layer is no single graph here
        type(made).embedding_modules = {}

    model.of_model = without_lora
    manager = make_manager(slots=2)
    manager._adapter_manager.trained_tokens._is_on_cpu = False  # as on a GPU
    layer = manager._adapter_manager.model.embed_tokens
    graph = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    step(manager)
    weight = layer.weight
    ids = torch.tensor([9, 3, 9])
    assert torch.equal(graph(ids), weight[ids])
    serve(manager, made := adapter(tmp_path, 1, IDS, embedding=rows(1)), 1)
    serve(manager, plain := adapter(tmp_path, 2), 0)
    step(manager, made, made, plain)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(graph(ids), torch.stack([rows(1)[0], rows(1)[1], weight[9]]))


def test_rows_of_a_prompt_are_those_of_its_request(
    make_manager: Make, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model.use_compiled_kernels(monkeypatch)  # vLLM's own end at other rows than those of a batch
    model.is_tied, model.scale = True, lambda hidden: 2 * hidden
    manager = make_manager()
    serve(manager, made := adapter(tmp_path, 1, IDS, embedding=rows(1)), 0)
    serve(manager, plain := adapter(tmp_path, 2), 1)
    step(manager, plain, plain, made, made)
    hidden, head = rows(5, 5)[1:], of_base(manager)[1]  # within a larger buffer, as in graphs
    wanted = 2 * hidden @ head.T
    wanted[2:, IDS] = 2 * hidden[2:] @ rows(1).T
    token = rows_of_batch.set(hidden)
    try:
        found = [logits(manager, hidden[first:end]) for first, end in ((0, 2), (2, 3), (1, 4))]
    finally:
        rows_of_batch.reset(token)
    parts = [wanted[:2], wanted[2:3], wanted[1:]]
    assert all(torch.allclose(one, part, atol=1e-5) for one, part in zip(found, parts, strict=True))


def test_without_tables_nothing_is_computed(make_manager: Make, model: Any, tmp_path: Path) -> None:
    manager = make_manager()
    serve(manager, plain := adapter(tmp_path, 1), 0)
    step(manager, plain)
    tokens, given = manager._adapter_manager.trained_tokens, torch.ones(1)
    tokens._tables = tokens._punica = None
    assert tokens._replace(None, None, given) is given
    assert tokens._with_logits(lambda _: given, given) is given


def test_more_rows_than_a_batch_has_end_no_step(make_manager: Make, model: Any, tmp_path: Path) -> None:
    """As of a draft that shares the target's embedding, and pads its batch."""
    manager = make_manager()
    serve(manager, made := adapter(tmp_path, 1, IDS, embedding=rows(1)), 0)
    step(manager, made)
    found = manager._adapter_manager.trained_tokens._replace(None, (torch.tensor([9] * 40),), torch.zeros(40, WIDTH))
    assert found.shape == (40, WIDTH)
    assert torch.equal(found[0], rows(1)[0])


@pytest.mark.parametrize(
    ("ids", "tensors", "kind", "says"),
    [
        ([9, WORDS], {"embedding": rows(1)}, IncompatibleAdapter, f"token {WORDS} trained"),
        (IDS, {"embedding": rows(1, features=8)}, IncompatibleAdapter, "rows of 8 trained"),
        (IDS, {"embedding": rows(1, 3)}, InvalidAdapter, "one tensor of 2 rows"),
        ([9], {"embedding": torch.full((1, WIDTH), float("nan"))}, InvalidAdapter, "NaN or infinity"),
    ],
    ids=["other words", "other features", "other ids", "nan"],
)
def test_a_worker_refuses_other_rows_than_the_models(
    make_manager: Make, model: Any, tmp_path: Path, ids: Any, tensors: Any, kind: type, says: str
) -> None:
    error = failure(make_manager(), adapter(tmp_path, 1, ids, **tensors))
    assert isinstance(error, kind)
    assert says in error.found + error.expected


def test_models_whose_rows_nothing_replaces_say_why(make_manager: Make, model: Any) -> None:
    manager = make_manager()._adapter_manager
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, enable_batch_sharded_sampling=False),
        model_config=SimpleNamespace(enable_prompt_embeds=False, hf_text_config=SimpleNamespace()),
    )
    found = find(manager, config)
    assert not isinstance(found, str)
    places, embedding, processor, _ = found
    assert (places.names, places.is_tied) == (("embed_tokens", "lm_head"), False)
    layer, head = embedding.base_layer, manager.model.lm_head
    reasons = []
    for owner, name, value in (
        (config.parallel_config, "pipeline_parallel_size", 2),
        (config.parallel_config, "enable_batch_sharded_sampling", True),
        (config.model_config, "enable_prompt_embeds", True),
        (layer, "reduce_results", False),
        (head, "embedding_dim", 8),
        (processor.base_layer, "logits_as_input", True),
        (manager, "_get_punica_wrapper", lambda _: None),
        (manager.model, "more", type(layer)(WORDS, WIDTH)),
    ):
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        reasons.append(find(manager, config))
        setattr(owner, name, before)
    assert all(isinstance(reason, str) and reason.startswith("as ") for reason in reasons)
    assert len({*reasons}) == 6
