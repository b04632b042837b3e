"""Plans the tensors of a mixture: each module's sum of its parts' products is one product of larger rank.

Runs in the API server when a mixture's name is fetched (`resolvers/sources/mixtures.py`). In go the parts, in the
engine's form, and their weights; out come the mixture's configuration and tensors, which the reading process writes.

A stacks the parts' A, and B joins the parts' B, each times its weight and its own scaling, as PEFT's
`add_weighted_adapter(combination_type="cat")`: w₁s₁B₁A₁ + w₂s₂B₂A₂ = [w₁s₁B₁ w₂s₂B₂] [A₁; A₂]. The rank is the sum of
the ranks, and the scaling is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lora_plugins.adapter.canonical import with_exact_patterns
from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.layouts.tensors import Joined, NewPair, NewTensor, new_pair
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.verify import VerifiedAdapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.adapter.weights import LoraPair, Weights
from lora_plugins.errors import IncompatibleAdapter


@dataclass(frozen=True, slots=True)
class PartOfMixture:
    """A part in the engine's form, in the directory `digest` of a store."""

    name: str
    weight: str
    digest: str
    adapter: VerifiedAdapter

    def __str__(self) -> str:
        return f"{self.adapter.config.max_rank} of '{self.name}'"

    def factor(self, pair: LoraPair) -> float:
        """Return the factor of a module's product: the weight of the part, times the scaling."""
        return float(self.weight) * self.adapter.config.scaling(pair.rank, pair.alpha)

    def source(self, tensor: TensorInfo) -> TensorInfo:
        """Return a tensor of the part, by the path of its file from the directory of any part."""
        return replace(tensor, file=f"../{self.digest}/{tensor.file or WEIGHTS_FILE}")


def plan_mixture(parts: Sequence[PartOfMixture]) -> tuple[AdapterConfig, tuple[NewTensor, ...]]:
    """Return the configuration of a mixture, and the tensors that are to be written.

    Raises:
        IncompatibleAdapter: a part is more than products of two matrices, or the parts are not of one model.
    """
    by_module: dict[tuple[str, bool], list[tuple[PartOfMixture, LoraPair]]] = {}
    for part in parts:
        for pair in paced(_plain(part).pairs):
            by_module.setdefault((pair.module, pair.is_looked_up), []).append((part, pair))
    made = [_pair(*key, pairs) for key, pairs in paced(sorted(by_module.items(), key=lambda item: item[0]))]
    rank = max(new.rank for new in made)
    config = AdapterConfig(rank, float(rank), None, parts[0].adapter.config.base_model)
    tensors = tuple(tensor for new in made for tensor in (new.a, new.b))
    return with_exact_patterns(config, [new.pair for new in made]), tensors


def _plain(part: PartOfMixture) -> Weights:
    weights = part.adapter.weights or Weights(())
    found = [*dict.fromkeys(str(one.kind) for one in weights.beside)]
    found += ["a saved head"] if weights.others or part.adapter.config.modules_to_save else []
    found += ["experts"] if any(pair.is_experts for pair in weights.pairs) else []
    if found:
        raise IncompatibleAdapter(
            f"'{part.name}' with {', '.join(found)} as a part of a mixture",
            expected="parts of pairs of lora_A and lora_B alone, whose sum is such pairs too",
            remedy="leave the part out, or ask for it alone",
        )
    return weights


def _pair(module: str, is_looked_up: bool, pairs: Sequence[tuple[PartOfMixture, LoraPair]]) -> NewPair:
    sizes = {(pair.a.shape[1], pair.b.shape[0]) for _, pair in pairs}
    if len(sizes) > 1:
        raise IncompatibleAdapter(
            f"parts with other sizes of module '{module}': {', '.join(map(str, sorted(sizes)))}",
            expected="adapters of one base model",
            remedy="mix adapters that were trained on one model",
        )
    rank, (width, height) = sum(pair.rank for _, pair in pairs), sizes.pop()
    of_a = Joined(0, tuple(pair.a.dtype for _, pair in pairs), (1.0,) * len(pairs))
    of_b = Joined(1, tuple(pair.b.dtype for _, pair in pairs), tuple(part.factor(pair) for part, pair in pairs))
    a = [part.source(pair.a) for part, pair in pairs], (rank, width), of_a
    b = [part.source(pair.b) for part, pair in pairs], (height, rank), of_b
    return new_pair(module, a, b, rank, float(rank), is_looked_up=is_looked_up)
