"""AdaLoRA in the engine's form: plain LoRA, whose A has the singular values, with AdaLoRA's scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from tests.adapter.layouts.converted import FUSED, base_of, convert, delta
from tests.adapter.verdicts import refusal
from tests.make import BASE, LAYER, PEFT, adapter_files, pair

Q, V = LAYER.format(0, "q_proj"), LAYER.format(0, "v_proj")
CONFIG = {"peft_type": "ADALORA", "r": 8, "init_r": 4, "lora_alpha": 6, "target_modules": "all-linear"}


def adalora(dtype: str = "float32", ranks: tuple[int, int] = (4, 4)) -> dict[str, np.ndarray]:
    """As PEFT 0.21 saves it: parameters of the module's own, without `.weight`."""
    tensors = {}
    for module, rank, high in ((Q, ranks[0], 8), (V, ranks[1], 4)):
        a, b = pair(module, rank, 8, high, dtype).values()
        values = np.random.default_rng(rank + high).normal(size=(rank, 1)).astype(dtype)
        tensors |= {f"{PEFT}{module}.lora_{side}": one for side, one in zip("ABE", (a, b, values), strict=True)}
    return tensors


def by_peft(tensors: dict[str, np.ndarray], module: str, alpha: float) -> np.ndarray:
    """`SVDLinear.forward` of PEFT 0.21: B (A * E), times alpha / (init_r + 0.00001)."""
    a, b, e = (tensors[f"{PEFT}{module}.lora_{side}"].astype(np.float64) for side in "ABE")
    return b @ (a * e) * alpha / (CONFIG["init_r"] + 1e-5)


WHOLE, PRUNED = (4, 4), (3, 2)
KEPT = {f"{Q}.lora_E": [True, False, True, True], f"{V}.lora_E": [True, True, False, False]}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    ("ranks", "config", "alpha"),
    [
        (WHOLE, {}, 6),
        (WHOLE, {"lora_alpha": 0}, 4),  # each module's rank
        (PRUNED, {"rank_pattern": KEPT}, 6),
        (PRUNED, {"rank_pattern": {f"{PEFT}{name}": kept for name, kept in KEPT.items()}}, 6),
    ],
    ids=["whole", "alpha of 0", "pruned", "PEFT's prefix"],
)
@pytest.mark.parametrize("base", [BASE, base_of(FUSED)], ids=["parts", "fused"])
def test_an_adapter_adds_to_weights_what_it_adds_in_peft(
    tmp_path: Path, base: BaseModel, ranks: tuple[int, int], config: dict[str, Any], alpha: int, dtype: str
) -> None:
    tensors = adalora(dtype, ranks)
    verified, made, target = convert(tmp_path, tensors, base, **{**CONFIG, **config})
    if base is BASE:
        found = [delta(made, module, target / CONFIG_FILE) for module in (Q, V)]
        assert "AdaLoRA's singular values multiplied into A (2 modules)" in verified.conversion.changes
    else:
        joined = delta(made, LAYER.format(0, "qkv_proj"), target / CONFIG_FILE)
        found = [joined[:8], joined[12:]]
    for module, one in zip((Q, V), found, strict=True):
        np.testing.assert_allclose(one, by_peft(tensors, module, alpha), rtol=2e-6)


def test_values_of_bfloat16_are_multiplied_in_float32(tmp_path: Path) -> None:
    bits = {name: one.view("<u4") >> 16 for name, one in adalora().items() if "lora_B" not in name}
    tensors = adalora() | {name: (one << 16).view("<f4") for name, one in bits.items()}
    halves = tensors | {name: one.astype("<u2") for name, one in bits.items()}
    _, made, target = convert(tmp_path, {}, BASE, files=adapter_files(halves, **CONFIG))
    np.testing.assert_allclose(delta(made, Q, target / CONFIG_FILE), by_peft(tensors, Q, 6), rtol=2e-6)


@pytest.mark.parametrize("alpha", [6, 0])
def test_pruned_adapters_add_what_peft_itself_adds(tmp_path: Path, alpha: int) -> None:
    from peft import PeftModel
    from torch import nn

    config = {**CONFIG, "lora_alpha": alpha, "rank_pattern": KEPT, "total_step": 9, "target_modules": r".*_proj"}
    _, made, target = convert(tmp_path, adalora(ranks=PRUNED), BASE, **config)
    base = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict()])})})
    base["model"]["layers"][0]["self_attn"] = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "v_proj": nn.Linear(8, 4)})
    served = PeftModel.from_pretrained(base, str(tmp_path / "original")).base_model
    for module in (Q, V):
        wanted = served.get_submodule(f"model.{module}").get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(delta(made, module, target / CONFIG_FILE), wanted, rtol=1e-4, atol=1e-7)


E_OF_Q = f"{PEFT}{Q}.lora_E"


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "says"),
    [
        (adalora(), {"peft_type": "LORA", "r": 4}, IncompatibleAdapter, "lora_E', without peft_type ADALORA in"),
        ({E_OF_Q: None}, {}, InvalidAdapter, f"no tensor 'lora_E' of module '{Q}'"),
        ({E_OF_Q: np.ones((5, 1), "float32")}, {}, InvalidAdapter, r"shape \[5, 1\]; expected shape \[4, 1\]"),
        ({f"{PEFT}x.lora_E": np.ones((4, 1), "float32")}, {}, InvalidAdapter, "expected none, without A and B"),
        ({E_OF_Q + ".default": np.ones((4, 1), "float32")}, {}, InvalidAdapter, "two tensors 'lora_E'"),
        ({E_OF_Q: np.full((4, 1), 1e6, "float32")}, {}, InvalidAdapter, "numbers up to 1e[+]06"),
        ({}, {"init_r": "4"}, InvalidAdapter, "init_r '4'"),
        ({}, {"init_r": ...}, InvalidAdapter, "no key 'init_r'"),
        ({}, {"rank_pattern": {"q": [False]}}, IncompatibleAdapter, "pruned 'q' to rank 0.*merge the adapter"),
        ({}, {"rank_pattern": {"q": -1}}, InvalidAdapter, "rank_pattern"),
        ({}, {"peft_type": "LOHA"}, IncompatibleAdapter, "peft_type 'LOHA'.*LORA, ADALORA or IA3"),
    ],
    ids=["LORA", "no values", "other", "no pair", "two", "large", "text", "no rank", "nothing left", "below 0", "LoHa"],
)  # fmt: skip
def test_what_peft_would_not_compute_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], config: dict[str, object], kind: type[LoRAPluginsError], says: str
) -> None:
    given = {name: one for name, one in (adalora() | tensors).items() if one is not None}
    refusal(tmp_path, given, kind=kind, says=says, **{**CONFIG, **config})
