"""Magnitudes (DoRA) of an embedding and of a head, whose words are padded, beside other rows; as PEFT computes both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter
from lora_plugins.kernels import cpu, packing
from lora_plugins.worker import row_norms, slot_counts, vectors
from tests.worker import small_model, test_fits
from tests.worker.small_model import WIDTH, Adapter, Make, evict, failure, make_adapter, serve
from tests.worker.test_fits import model_with_words
from tests.worker.test_vectors import PEFT, kernels, model

__all__ = ["kernels", "model"]
WORDS = 50
MAGNITUDE, EMBEDDING, HEAD = "lora_magnitude_vector", "embed_tokens", "lm_head"
LENGTHS = {EMBEDDING: WIDTH, HEAD: WORDS}


@pytest.fixture(autouse=True)
def words(model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has an embedding and a head; what lies in rows of padding is not 0."""
    from vllm.config import ModelConfig

    monkeypatch.setattr(test_fits, "WORDS", WORDS)
    monkeypatch.setattr(ModelConfig, "get_vocab_size", lambda _: WORDS)
    make = small_model.small_model

    def made() -> Any:
        of_vllm, generator = model_with_words(make), torch.Generator().manual_seed(4)
        for name in (EMBEDDING, HEAD):
            layer = getattr(of_vllm, name)
            layer.weight.data = torch.randn(layer.weight.shape, generator=generator)
            layer.cpu_linear = torch.nn.functional.linear
            assert len(layer.weight) > WORDS
        return of_vllm

    monkeypatch.setattr(small_model, "small_model", made)
    monkeypatch.setattr(row_norms, "_WORDS", 5)


def tensors_of(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    sizes = {
        f"{EMBEDDING}.lora_embedding_A": (4, WORDS),
        f"{EMBEDDING}.lora_embedding_B": (WIDTH, 4),
        f"{HEAD}.lora_A.weight": (4, WIDTH),
        f"{HEAD}.lora_B.weight": (WORDS, 4),
        **{f"{name}.{MAGNITUDE}": (length,) for name, length in LENGTHS.items()},
    }
    return {f"{PEFT}{name}": torch.randn(size, generator=generator) + 1 for name, size in sizes.items()}


def adapter(directory: Path, number: int, *, is_dora: bool = True, **change: torch.Tensor | None) -> Adapter:
    given = tensors_of(number) | {f"{PEFT}{name}": one for name, one in change.items()}
    kept = {name: one for name, one in given.items() if one is not None and (is_dora or MAGNITUDE not in name)}
    ours = ["use_dora"] if is_dora else []  # as the store writes it
    return make_adapter(directory / str(number), number, modules={}, change=kept, lora_plugins=ours)


def weights(manager: Any, number: int | None, *, is_dora: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas of PEFT 0.21 (`DoraEmbeddingLayer`, `DoraLinearLayer`): the embedding's weight, and the head's."""
    found, own = [], {} if number is None else tensors_of(number)
    for name, axis, sides in ((EMBEDDING, 0, "embedding_"), (HEAD, 1, "")):
        weight = vectors.base_of(manager._adapter_manager.model.get_submodule(name)).weight[:WORDS].clone()
        if own:
            a, b = (own[f"{PEFT}{name}.lora_{sides}{side}" + ("" if sides else ".weight")] for side in "AB")
            weight += 2 * ((b @ a).T if sides else b @ a)  # the scaling of `make_adapter`
            if is_dora:
                weight *= (own[f"{PEFT}{name}.{MAGNITUDE}"] / weight.norm(dim=axis)).unsqueeze(axis)
        found.append(weight)
    return found[0], found[1]


def check(manager: Any, *rows: tuple[Adapter | None, bool]) -> None:
    from vllm.lora.layers import LoRAMapping

    ids = tuple(it.adapter_id if it else 0 for it, _ in rows)
    used = {it.request() for it, _ in rows if it}
    manager.set_active_adapters(used, LoRAMapping(ids, ids, is_prefill=True))
    modules = manager._adapter_manager.modules
    asked = torch.arange(len(rows)) + 7
    hidden = torch.randn(len(rows), WIDTH, generator=torch.Generator().manual_seed(5))
    embedded = modules[EMBEDDING](asked)
    logits = modules[HEAD]._get_logits(hidden, manager._adapter_manager.model.lm_head)
    assert logits.shape == (len(rows), WORDS)
    for row, (it, is_dora) in enumerate(rows):
        embedding, head = weights(manager, it and it.adapter_id, is_dora=is_dora)
        torch.testing.assert_close(embedded[row], embedding[asked[row]], rtol=2e-4, atol=2e-4, msg=f"embedding, {row}")
        torch.testing.assert_close(logits[row], hidden[row] @ head.T, rtol=2e-4, atol=2e-4, msg=f"head, {row}")


def test_magnitudes_of_words_are_computed_beside_other_rows(make_manager: Make, kernels: None, tmp_path: Path) -> None:
    manager = make_manager(slots=3)
    dora, other, plain = (adapter(tmp_path, n, is_dora=n < 3) for n in (1, 2, 3))
    for slot, it in enumerate((dora, other, plain)):
        serve(manager, it, slot)
    check(manager, (dora, True), (plain, False), (None, False), (other, True), (dora, True))
    check(manager, (dora, True), (dora, True))
    evict(manager, dora)
    serve(manager, second := adapter(tmp_path, 4, is_dora=False), 0)
    check(manager, (second, False), (None, False), (other, True))


def test_a_head_of_a_large_rank_is_computed_by_torch(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "LARGEST_COPIED_RANK", 0)
    for user in (packing, slot_counts):
        monkeypatch.setattr(user, "are_pointed", lambda *_, **__: False)
    manager = make_manager()
    serve(manager, it := adapter(tmp_path, 1), 0)
    check(manager, (it, True), (None, False))


def test_workers_add_up_the_squares_of_their_own_words(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the second of two workers, which has the words from 32 on, and padding."""
    manager, it = make_manager(), adapter(tmp_path, 1)
    own = tensors_of(1)
    model, others = manager._adapter_manager.model, []
    for name, axis, sides in ((EMBEDDING, 0, "embedding_"), (HEAD, 1, "")):
        base = vectors.base_of(model.get_submodule(name))
        a, b = (own[f"{PEFT}{name}.lora_{sides}{side}" + ("" if sides else ".weight")] for side in "AB")
        first = (base.weight[:WORDS] + 2 * ((b @ a).T if sides else b @ a))[:32].square().sum(axis)
        others.append(torch.cat([first, torch.zeros(LENGTHS[name] - len(first))]))
        base.tp_size, base.tp_rank = 2, 1
        base.shard_indices = base._get_indices(64, 64, WORDS, WORDS, 1, 2)
    wanted = weights(manager, 1, is_dora=True)
    whole = {name: vectors.base_of(model.get_submodule(name)).weight.data for name in (EMBEDDING, HEAD)}
    for name, weight in whole.items():
        vectors.base_of(model.get_submodule(name)).weight.data = weight[32:]
    monkeypatch.setattr(vectors, "_sum_of_workers", lambda squares: squares + torch.cat(others))
    serve(manager, it, 0)
    for name, weight in whole.items():
        vectors.base_of(model.get_submodule(name)).weight.data = weight
    for name in whole:
        ranks = vectors.watched_ranks(manager._adapter_manager.modules[name])
        g = ranks.vectors[0].g
        plain = weights(manager, 1, is_dora=False)[name == HEAD]
        torch.testing.assert_close(plain * (g if name == EMBEDDING else g[:, None]), wanted[name == HEAD])


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({f"{EMBEDDING}.{MAGNITUDE}": torch.ones(9)}, InvalidAdapter, r"\[9\]; expected shape \[16\]"),
        ({f"{HEAD}.{MAGNITUDE}": torch.ones(9)}, InvalidAdapter, r"\[9\]; expected shape \[50\]"),
        ({f"{EMBEDDING}.{MAGNITUDE}.weight": torch.ones(WIDTH)}, InvalidAdapter, f"two tensors .* '{EMBEDDING}'"),
        ({f"{EMBEDDING}.lora_embedding_A": None}, InvalidAdapter, f"lora_B of module '{EMBEDDING}' alone"),
        ({f"{EMBEDDING}.{MAGNITUDE}": None}, InvalidAdapter, f"no tensor '{MAGNITUDE}' of module .*{EMBEDDING}"),
        ({f"{HEAD}.{MAGNITUDE}": torch.full((WORDS,), torch.nan)}, IncompatibleAdapter, "'lm_head' that is not finite"),
    ],
    ids=["size", "head's size", "two", "no A", "lost", "NaN"],
)
def test_what_cannot_be_computed_is_refused(
    make_manager: Make, tmp_path: Path, change: dict[str, torch.Tensor | None], kind: type[Exception],
    says: str,
) -> None:  # fmt: skip
    with pytest.raises(kind, match=says):
        raise failure(make_manager(), adapter(tmp_path, 1, **change))


@pytest.mark.parametrize("what", ["bias", "rows"])
def test_a_head_with_a_bias_or_without_rows_is_refused(make_manager: Make, tmp_path: Path, what: str) -> None:
    manager = make_manager()
    head = manager._adapter_manager.model.lm_head
    if what == "bias":
        head.bias = torch.nn.Parameter(torch.ones(64), requires_grad=False)
    else:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        head.quant_method = UnquantizedLinearMethod()
    assert "magnitudes of 'lm_head'" in str(failure(manager, adapter(tmp_path, 1)))
