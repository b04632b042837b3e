"""Pairs the tensors of an adapter, A and B of each module, and checks the pairs against the adapter's configuration.

`pair_weights` runs in the reading process, in `lora-plugins inspect` and in workers, after the header of the weights
was read. In go tensors by name, dtype and shape (no values) and the configuration; out come the pairs with each
module's rank and alpha, or the error that refuses the adapter. Whether the engine has the modules is for `landing.py`.

Names: `[base_model.model.]<module>.lora_A.weight`, `.lora_B.weight`, `.lora_embedding_A`, `.lora_embedding_B`
(`parse_fine_tuned_lora_name` in `vllm/lora/utils.py`, 0.32). A state dict that was saved without PEFT's own function
has the adapter's name in its keys as well, `.lora_A.default.weight`, and SkyRL's experts end with `.lora_A`
(`get_expert_key` in skyrl/tx/utils/models.py, 0.3.0); vLLM reads neither (`adapter/layouts`).
Shapes: A `(rank, in)`, B `(out, rank)`.

Beside A and B, a module may have tensors that vLLM does not read (`Beside`; `BesideKind` lists them), such as
`.token_adapter.trainable_tokens_delta`, the rows of trained tokens, `(tokens, features)`. DoRA, AdaLoRA and `lora_bias`
have one tensor of their kind for each pair; an adapter of IA3 has no pairs, only tensors of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lora_plugins.adapter.config import ADALORA, CLASSIFIER_HEADS, IA3, AdapterConfig, malformed, without_effect
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.patterns import PatternBudget
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.writers import FROM_MERGEKIT, NOT_GATHERED, foreign_key, unwrapped
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter

PREFIX = "base_model.model."
_SAME_TRAINING = "put the adapter_config.json and the weights of the same training run together"
_NAME = re.compile(
    r"(?P<module>.+?)\.lora_(?:(?P<side>[AB])(?:(?:\.(?P<adapter>[^.]+))?\.weight)?"
    r"|embedding_(?P<looked_up>[AB])(?:\.(?P<its_adapter>[^.]+))?)"
)
# The last group is a name of `BesideKind`.
_BESIDE = re.compile(
    r"(?P<module>.+?)\.(?:(?P<TOKENS>token_adapter\.trainable_tokens_delta)(?:\.[^.]+)?|(?P<SINGULAR>lora_E)(?:\.[^.]+)?"
    r"|(?P<OUTPUTS>ia3_l)(?:\.[^.]+)?"
    r"|(?P<MAGNITUDE>lora_magnitude_vector)(?:\.[^.]+){0,2}|lora_B(?:\.[^.]+)?\.(?P<B_BIAS>bias)"
    r"|(?:base_layer\.)?(?P<BIAS>bias))"
)
_BASE_EMBEDDINGS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
_VELORA = re.compile(r"\.lora_velora_embed\b")
_NORM = re.compile(r"norm[^.]*\.weight$")
_WHOLE_EMBEDDINGS = (".embed_tokens.weight", ".lm_head.weight")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A (shrink, `(rank, in)`) and B (expand, `(out, rank)`) of one module.

    Attributes:
        module: the name in the file, without `base_model.model.`.
        rank, alpha: the configuration's for the module.
        is_looked_up: whether the pair is an embedding's: A is looked up by token ids, not multiplied.
    """

    module: str
    a: TensorInfo
    b: TensorInfo
    rank: int
    alpha: float
    is_looked_up: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The names of A and B as PEFT's own function saves, and vLLM reads."""
        a, b = (f"{PREFIX}{self.module}.lora_{'embedding_' if self.is_looked_up else ''}{side}" for side in "AB")
        return (a, b) if self.is_looked_up else (f"{a}.weight", f"{b}.weight")

    @property
    def is_experts(self) -> bool:
        """Whether the pair belongs to fused experts, whose tensors stack several matrices."""
        return ".experts" in self.module


class BesideKind(StrEnum):
    """What a tensor beside A and B is for, by PEFT's name."""

    TOKENS = "token_adapter.trainable_tokens_delta"  # rows of an embedding or a head, in the place of the base model's
    SINGULAR = "lora_E"  # of AdaLoRA, a factor of each row of A
    MAGNITUDE = "lora_magnitude_vector"  # of DoRA, the norm of each row of the whole weight
    B_BIAS = "lora_B.bias"  # of `lora_bias`, added to B's product before the scaling
    BIAS = "bias"  # in the place of the base model's
    OUTPUTS = "ia3_l"  # of IA3, `(out, 1)`, a factor of each output, the base model's bias in it
    INPUTS = "ia3_l of inputs"  # the same, `(1, in)`, of each input

    @property
    def key(self) -> str:
        """The key of the configuration without which PEFT leaves the tensor out."""
        return _KEYS[self]

    @property
    def end(self) -> str:
        """The end of the tensor's name."""
        return self.partition(" ")[0]


_KEYS = {
    BesideKind.TOKENS: "trainable_token_indices",
    BesideKind.SINGULAR: ADALORA,
    BesideKind.MAGNITUDE: "use_dora",
    BesideKind.B_BIAS: "lora_bias",
    BesideKind.BIAS: "bias",
    BesideKind.OUTPUTS: IA3,
    BesideKind.INPUTS: IA3,
}


@dataclass(frozen=True, slots=True)
class Beside:
    """A tensor that a module has beside A and B, or without them."""

    module: str
    kind: BesideKind
    tensor: TensorInfo

    @property
    def name_of_a(self) -> str:
        """The name of the module's A, present or not: from A's name, vLLM's own function finds the engine's module."""
        return f"{PREFIX}{self.module}.lora_A.weight"


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of an adapter.

    Attributes:
        others: tensors of whole modules: a classifier's head, and copies of the base model's embeddings, which vLLM
            leaves out.
        name_in_keys: the adapter's name in its keys (`.lora_A.default.weight`); None where keys have no name.
        beside: tensors that modules have beside A and B, or without them.
    """

    pairs: tuple[LoraPair, ...]
    others: tuple[TensorInfo, ...] = ()
    name_in_keys: str | None = None
    beside: tuple[Beside, ...] = ()


def pair_weights(tensors: Iterable[TensorInfo], config: AdapterConfig) -> Weights:
    """Pair every A with its B and check ranks against the configuration.

    Raises:
        InvalidAdapter: an A without its B, ranks that disagree, no pair at all; for IA3, a pair, or no factor.
        IncompatibleAdapter: a tensor that vLLM cannot apply.
    """
    # By module, and whether the pair is an embedding's: the tensors by side, "A" and "B".
    sides: dict[tuple[str, bool], dict[str, TensorInfo]] = {}
    others, names = [], set()
    beside: list[Beside] = []
    for tensor in paced(tensors):
        if is_copy_of_embeddings(tensor) or _is_classifier_head(tensor.name, config):
            others.append(tensor)
            continue
        if (one := beside_of(tensor)) is not None:
            beside.append(one)
            continue
        module, side, is_looked_up, name = _split(tensor.name)
        names.add(name)
        pair = sides.setdefault((module, is_looked_up), {})
        if side in pair:
            raise malformed(f"two {side} tensors for module '{module}'", "one")
        pair[side] = tensor
    # Before pairing: an A of the first adapter must not meet a B of the second.
    if len(names) > 1:
        found = ", ".join(sorted(name or "none" for name in names))
        raise InvalidAdapter(
            f"tensors of several adapters in one file (names in their keys: {found[:100]})",
            expected="one adapter",
            remedy="save each adapter by itself with PEFT's save_pretrained",
        )
    # One budget for all patterns of an adapter: many cheap matches must not add up either.
    budget, rank_of, alpha_of = PatternBudget(), config.ranks(), config.alphas()
    pairs = tuple(
        _pair(module, pair, rank_of(name, budget), alpha_of(name, budget), is_looked_up)
        for (module, is_looked_up), pair in paced(sides.items())
        for name in [parameter_of(module)]
    )
    if IA3 not in config.beside and not pairs:
        raise malformed("no pair of lora_A and lora_B", "at least one")
    if IA3 in config.beside and not any(one.kind.key == IA3 for one in beside):
        raise malformed("no tensor ia3_l", "at least one")
    if IA3 in config.beside and pairs:
        raise InvalidAdapter(
            f"tensor '{pairs[0].a.name}' with {IA3}", expected="tensors ia3_l alone", remedy=_SAME_TRAINING
        )
    if pairs and not any(pair.alpha for pair in pairs):
        raise without_effect("lora_alpha or alpha_pattern 0 for each of its modules")
    _check_wrapped(pairs, lambda name: (rank_of(name, budget), alpha_of(name, budget)))
    _check_ranks(pairs)
    return Weights(pairs, tuple(others), next(iter(names), None), check_beside(beside, config, pairs))


def beside_of(tensor: TensorInfo) -> Beside | None:
    """Return the module and kind of a tensor beside A and B, by the tensor's name; None for any other tensor.

    The name may have the adapter's name in it, or not.
    """
    found = _BESIDE.fullmatch(_without_prefix(tensor.name))
    # A bias of a classifier's head belongs to the whole head, which vLLM reads itself.
    if found is None or (found["BIAS"] and found["module"].rpartition(".")[2] in CLASSIFIER_HEADS):
        return None
    kind = BesideKind[str(found.lastgroup)]
    # The pattern cannot tell both kinds of IA3 apart: the shape does.
    is_row = kind is BesideKind.OUTPUTS and tensor.shape[:1] == (1,)
    return Beside(found["module"], BesideKind.INPUTS if is_row else kind, tensor)


def check_beside(beside: Iterable[Beside], config: AdapterConfig, pairs: Iterable[LoraPair]) -> tuple[Beside, ...]:
    """Return the tensors beside A and B, once checked: PEFT leaves out tensors that the configuration does not name.

    Raises:
        IncompatibleAdapter: a tensor that the configuration does not name.
        InvalidAdapter: a tensor twice, of another shape, or missing.
    """
    of_kind: dict[BesideKind, dict[str, Beside]] = {kind: {} for kind in BesideKind}
    for one in paced(beside):
        if any(one.module in of_kind[kind] for kind in BesideKind if kind.key == one.kind.key):
            raise malformed(f"two tensors '{one.kind}' for module '{one.module}'", "one tensor")
        of_kind[one.kind][one.module] = one
    _check_tokens(of_kind[BesideKind.TOKENS], config)
    of_pairs = {pair.module: pair for pair in pairs}
    for kind, tensors in of_kind.items():
        if kind is not BesideKind.TOKENS:
            _check_of_kind(kind, tensors, config, of_pairs)
    return tuple(one for tensors in of_kind.values() for one in tensors.values())


def _check_of_kind(
    kind: BesideKind, tensors: Mapping[str, Beside], config: AdapterConfig, of_pairs: Mapping[str, LoraPair]
) -> None:
    """Check the tensors of one kind, by module: the configuration has the key, and shapes fit the modules' pairs."""
    for module, one in paced(tensors.items()):
        name, shape = one.tensor.name, one.tensor.shape
        if kind.key not in config.beside:
            raise IncompatibleAdapter(
                f"tensor '{name}', without {kind.key} in adapter_config.json",
                expected="the configuration of the same training, as PEFT leaves the tensor out without",
                remedy=f"give the configuration its {kind.key} again, or merge the adapter into the base model",
            )
        expected = _shape_of_kind(kind, shape, of_pairs.get(module))
        if shape != expected:
            wanted = f"shape {list(expected)}" if expected else "none, without A and B"
            raise malformed(f"tensor '{name}' of shape {list(shape)}", wanted)
    # A bias may be of some modules only; every other kind is of each module with A and B.
    is_of_each = kind.key in config.beside and kind is not BesideKind.BIAS
    # IA3 has no pairs, so no module counts as lost.
    if is_of_each and (lost := next((module for module in of_pairs if module not in tensors), None)):
        raise malformed(f"no tensor '{kind}' of module '{lost}'", f"one, by {kind.key}")


def _shape_of_kind(kind: BesideKind, shape: tuple[int, ...], pair: LoraPair | None) -> tuple[int, ...]:
    """Return the shape that a tensor found with `shape` should have; `()` where a module without A and B has none."""
    if kind.key == IA3:
        return (1, shape[-1]) if kind is BesideKind.INPUTS else (*shape[:1], 1)
    if pair is None:
        return shape[:1] if kind is BesideKind.BIAS else ()  # `bias: all` saves biases of any module
    return (pair.rank, 1) if kind is BesideKind.SINGULAR else pair.b.shape[:1]


def _check_tokens(tensors: Mapping[str, Beside], config: AdapterConfig) -> None:
    """Check the rows of trained tokens, by module: one row for each id, and every list of ids has its rows."""
    for one in tensors.values():
        name, shape, ids = one.tensor.name, one.tensor.shape, config.tokens_of(one.module)
        if not ids:
            raise IncompatibleAdapter(
                f"trained token embeddings (trainable_token_indices), by tensor '{name}', whose ids are not named",
                expected="the ids in adapter_config.json",
                remedy="give the configuration its trainable_token_indices again, the ids of the rows in order",
            )
        if len(shape) != 2 or shape[0] != len(ids):
            raise InvalidAdapter(
                f"trained tokens '{name}' of shape {list(shape)}",
                expected=f"one tensor of {len(ids)} rows, by trainable_token_indices",
                remedy=_SAME_TRAINING,
            )
    # By ids, not by module: PEFT saves no rows for a head that shares its weight with the embedding, but lists the same
    # ids for both.
    saved = {config.tokens_of(module) for module in tensors}
    if lost := [module for module, ids in config.token_ids.items() if ids not in saved]:
        raise malformed(
            f"no rows of the trained tokens of '{lost[0] or 'the embedding'}'",
            "a tensor trainable_tokens_delta, by trainable_token_indices",
        )


def is_copy_of_embeddings(tensor: TensorInfo) -> bool:
    """Return whether a tensor is a copy of the base model's embeddings, which vLLM leaves out."""
    return tensor.name.endswith(_BASE_EMBEDDINGS)


def _is_classifier_head(name: str, config: AdapterConfig) -> bool:
    parts = name.split(".")
    return len(parts) >= 2 and parts[-1] in ("weight", "bias") and parts[-2] in config.modules_to_save


def _split(name: str) -> tuple[str, str, bool, str | None]:
    """Return module, side, whether the module is an embedding, and the adapter's name in the key, if any."""
    found = _NAME.fullmatch(_without_prefix(name))
    if found is None and name.endswith(_WHOLE_EMBEDDINGS):
        raise IncompatibleAdapter(
            f"tensor '{name}', a whole embedding, which PEFT saves where words were added to the vocabulary",
            expected="A and B alone, for the base model's own vocabulary",
            remedy="merge the adapter into the model with these words and serve the result; where none were added, "
            f"save it with save_embedding_layers=False; {FROM_MERGEKIT}",
        )
    if found is None and _VELORA.search(name):
        raise IncompatibleAdapter(
            f"tensor '{name}' of VeLoRA, which PEFT uses in training alone",
            expected="A and B alone, with which VeLoRA answers as LoRA does",
            remedy="remove the tensors named lora_velora_embed from the file, and velora_config from its configuration",
        )
    if (found is None or name.endswith((".lora_A", ".lora_B"))) and (foreign := foreign_key(name)):
        raise foreign
    if found is None:
        raise IncompatibleAdapter(
            f"tensor '{name}', which is no LoRA weight",
            expected="tensors named <module>.lora_A.weight, .lora_B.weight, .lora_embedding_A or .lora_embedding_B",
            remedy="save the adapter alone, without full weights, or merge it into the base model"
            + (f"; {FROM_MERGEKIT}" if _NORM.search(name) else ""),
        )
    side, looked_up = found["side"], found["looked_up"]
    return found["module"], side or looked_up, side is None, found["adapter"] or found["its_adapter"]


def _without_prefix(name: str) -> str:
    # As vLLM's `parse_fine_tuned_lora_name`, which replaces every occurrence of the prefix.
    return name.replace(PREFIX, "") if name.startswith(PREFIX) else name


def _pair(module: str, sides: dict[str, TensorInfo], rank: int, alpha: float, is_looked_up: bool) -> LoraPair:
    """Return the pair of these tensors, by side; only experts may have three dimensions, see `adapter/layouts`."""
    if len(sides) != 2:
        (side,) = sides
        raise malformed(f"lora_{side} of module '{module}' alone", "lora_A and lora_B for every module")
    pair = LoraPair(module, sides["A"], sides["B"], rank, alpha, is_looked_up)
    for tensor in (pair.a, pair.b):
        is_flat = len(tensor.shape) == 1
        if is_flat or (len(tensor.shape) != 2 and not pair.is_experts):
            raise IncompatibleAdapter(
                f"shape {list(tensor.shape)} of tensor '{tensor.name}'",
                expected="two dimensions",
                remedy=NOT_GATHERED if is_flat else "leave convolutions out of target_modules",
            )
    return pair


def parameter_of(module: str) -> str:
    """Return the module's name for comparing with patterns of the configuration.

    PEFT wraps the two parameters of stacked experts into each other (`target_parameters`), and matches the parameters'
    own names (`PEFTHelper.get_rank_and_scaling` in vllm/lora/peft_helper.py, 0.32).
    """
    if module.endswith(".experts.base_layer"):
        return module.removesuffix(".base_layer") + ".gate_up_proj"
    return module + ".down_proj" if module.endswith(".experts") else module


def _check_wrapped(pairs: Iterable[LoraPair], values_of: Callable[[str], tuple[int, float]]) -> None:
    """Refuse patterns that match a name only without its wrappers, as `_orig_mod`: the training may have used both."""
    for pair in paced(pairs):
        if "._" not in pair.module:
            # A wrapper's part of a name begins with `_`. `module`, a wrapper in front of all other parts, does not
            # matter: patterns match the ends of names.
            continue
        name = parameter_of(unwrapped(pair.module))
        if values_of(name) != (pair.rank, pair.alpha):
            raise IncompatibleAdapter(
                f"a rank or alpha of module '{name}' by a pattern that '{pair.module}' does not match",
                expected="names without wrappers, or patterns that match with them and without",
                remedy="save it again from the model that the wrapper holds",
            )


def _check_ranks(pairs: Iterable[LoraPair]) -> None:
    """Refuse a pair whose shapes have another rank than the configuration's."""
    for pair in paced(pairs):
        if pair.is_experts:
            continue  # only the model says how many experts a tensor stacks
        of_a, of_b = pair.a.shape[0], pair.b.shape[1]
        if (of_a, of_b) != (pair.rank, pair.rank):
            is_part = of_b == pair.rank and pair.rank % of_a == 0  # FSDP2 divides rows, which are A's ranks
            raise InvalidAdapter(
                f"rank {of_a} in '{pair.a.name}' and {of_b} in '{pair.b.name}'",
                expected=f"rank {pair.rank} in both, by the configuration",
                remedy=NOT_GATHERED if is_part else _SAME_TRAINING,
            )
