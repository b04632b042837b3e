"""The tensors of an adapter as pairs A and B of a module, checked against its configuration.

Names: `[base_model.model.]<module>.lora_A.weight`, `.lora_B.weight`, `.lora_embedding_A`, `.lora_embedding_B`
(`parse_fine_tuned_lora_name` in `vllm/lora/utils.py`, 0.32). Shapes: A `(rank, in)`, B `(out, rank)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.patterns import Deadline
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter

_PREFIX = "base_model.model."
_SUFFIXES = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
}
_BASE_EMBEDDINGS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A (shrink, `(rank, in)`) and B (expand, `(out, rank)`) of one module; `rank` is the configuration's for it."""

    module: str
    a: TensorInfo
    b: TensorInfo
    rank: int

    @property
    def is_experts(self) -> bool:
        """Whether this belongs to fused experts, whose tensors stack several matrices."""
        return ".experts" in self.module


@dataclass(frozen=True, slots=True)
class Weights:
    """What a file holds: pairs, and copies of the base model's embeddings, which vLLM leaves out."""

    pairs: tuple[LoraPair, ...]
    base_embeddings: tuple[tuple[str, TensorInfo], ...] = ()


def pair_weights(tensors: Iterable[TensorInfo], config: AdapterConfig) -> Weights:
    """Pair every A with its B and check ranks against the configuration.

    Raises:
        InvalidAdapter: an A without its B, ranks that disagree, no pair at all.
        IncompatibleAdapter: a tensor that vLLM cannot apply.
    """
    sides: dict[str, dict[str, TensorInfo]] = {}
    embeddings = []
    for tensor in tensors:
        if tensor.name.endswith(_BASE_EMBEDDINGS):
            embeddings.append((tensor.name.removeprefix(_PREFIX).removesuffix(".base_layer.weight"), tensor))
            continue
        if _is_classifier_head(tensor.name, config):
            continue
        module, side = _split(tensor.name)
        if side in sides.setdefault(module, {}):
            raise InvalidAdapter(
                f"two {side} tensors for module '{module}'", expected="one", remedy="save the adapter again with PEFT"
            )
        sides[module][side] = tensor
    deadline, rank_of = Deadline(), config.ranks()
    pairs = tuple(_pair(module, pair, rank_of(module, deadline)) for module, pair in sides.items())
    if not pairs:
        raise InvalidAdapter(
            "no pair of lora_A and lora_B", expected="at least one", remedy="save the adapter again with PEFT"
        )
    _check_ranks(pairs)
    return Weights(pairs, tuple(embeddings))


def _is_classifier_head(name: str, config: AdapterConfig) -> bool:
    parts = name.split(".")
    return len(parts) >= 2 and parts[-1] in ("weight", "bias") and parts[-2] in config.modules_to_save


def _split(name: str) -> tuple[str, str]:
    for suffix, side in _SUFFIXES.items():
        if name.endswith(suffix):
            module = name.removeprefix(_PREFIX).removesuffix(suffix)
            if module:
                return module, side
    raise IncompatibleAdapter(
        f"tensor '{name}', which is no LoRA weight",
        expected="only tensors named <module>.lora_A.weight, .lora_B.weight, .lora_embedding_A or .lora_embedding_B",
        remedy="save the adapter alone, without full weights, or merge it into the base model",
    )


def _pair(module: str, sides: dict[str, TensorInfo], rank: int) -> LoraPair:
    if len(sides) != 2:
        (side,) = sides
        raise InvalidAdapter(
            f"lora_{side} of module '{module}' alone",
            expected="lora_A and lora_B for every module",
            remedy="save the adapter again with PEFT",
        )
    pair = LoraPair(module, sides["A"], sides["B"], rank)
    for tensor in (pair.a, pair.b):
        if len(tensor.shape) != 2 and not pair.is_experts:
            raise IncompatibleAdapter(
                f"shape {list(tensor.shape)} of tensor '{tensor.name}'",
                expected="two dimensions",
                remedy="leave convolutions out of target_modules",
            )
    return pair


def _check_ranks(pairs: Iterable[LoraPair]) -> None:
    for pair in pairs:
        if pair.is_experts:
            continue  # how many of them a tensor stacks, the model says
        if (pair.a.shape[0], pair.b.shape[1]) != (pair.rank, pair.rank):
            raise InvalidAdapter(
                f"rank {pair.a.shape[0]} in '{pair.a.name}' and {pair.b.shape[1]} in '{pair.b.name}'",
                expected=f"rank {pair.rank} in both, by the configuration",
                remedy="put the adapter_config.json and the weights of the same training run together",
            )
