"""The description of an engine's model: the modules that LoRA can adapt, with their sizes and the reading of names.

A worker makes the description once, after loading the model (`worker/model_description.py`), and sends plain values to
the API server; the store keeps them for other processes (`plain`, `of_plain`). API server, command line and workers
compare adapters with the description (`landing.py`, `complete.py`, `layouts/`). Nothing of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

# Version of the values of `plain`: workers and stores of another release may have another form.
FORMAT = 9


class ModuleKind(StrEnum):
    """A kind of module, as far as the shapes of an adapter's tensors differ."""

    LINEAR = "linear"
    EMBEDDING = "embedding"  # A is looked up in: (rank, vocabulary)
    HEAD = "head"
    EXPERTS = "experts"  # matrices of a mixture of experts, of a single expert or of all
    CLASSIFIER = "classifier"  # a whole weight, in the place of A and B too


class Unadapted(StrEnum):
    """Why a module of the model takes no adapter in this engine."""

    TOWER = "tower"  # of a tower or connector, and the engine runs without --enable-tower-connector-lora
    TARGET = "target"  # left out by --lora-target-modules
    KIND = "kind"  # vLLM adapts no module of this kind in this model
    UNCALLED = "uncalled"  # vLLM wraps the module, and computes with the raw layer or with its weight
    OTHERWISE = "otherwise"  # vLLM turns (permutes) or scales the module's rows, and leaves an adapter's as they are


class ExpertFormat(StrEnum):
    """How an adapter holds the experts of a layer; w1 is the layer's gate_proj, w2 its down_proj and w3 its up_proj."""

    PER_EXPERT = "2d"  # `<module>.<expert>.<name>`: a pair for each expert's w1, w2 and w3
    STACKED = "3d"  # `<module>.base_layer`: w13, w1 and w3 of all experts in one pair; `<module>`: w2 of all experts
    SHARED = "shared"  # `<module>.w1`, `.w2`, `.w3`: three dimensions; A of w1 and w3 and B of w2 are all experts'


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of one layer, with the sizes of the whole model.

    Attributes:
        count: of experts.
        hidden_size: features of a token: the inputs of w1, w3 and w13, the outputs of w2.
        intermediate_size: outputs of w1 and of w3, half of w13's outputs, the inputs of w2.
        formats: formats that the engine takes.
        names: an expert's names for w1, w2 and w3, such as `gate_proj`; w3 is missing where w1 is up_proj.
        is_interleaved: whether w13's outputs alternate between w1 and w3 (gpt-oss), not all of w1's first.
    """

    count: int
    hidden_size: int
    intermediate_size: int
    formats: tuple[ExpertFormat, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False


class ModulePlace(msgspec.Struct, frozen=True, array_like=True):
    """The module and the sizes of a pair of A and B; sizes of the whole model, not of a worker's part.

    Attributes:
        module: the engine's module; a place may be one of several parts (`qkv_proj` has `q_proj`, …).
        in_features, out_features: None where only the engine knows.
        max_out_features: whether fewer outputs fit as well, as with a head that knows fewer words.
        part: of experts: `w1`, `w2`, `w3` or `w13`.
        stacked: how many experts' matrices are one tensor: A is (experts x rank, inputs), B (outputs, rank x experts).
        matrices: outputs of each matrix of a fused module, where the engine takes a single pair for all matrices.
        factor: of a gated MLP's `down_proj`, the place of `up_proj`, whose outputs are a factor of the inputs.
    """

    module: str
    kind: ModuleKind = ModuleKind.LINEAR
    in_features: int | None = None
    out_features: int | None = None
    max_out_features: bool = False
    part: str = ""
    stacked: int = 1
    matrices: tuple[int, ...] = ()
    factor: str = ""


class TokenPlaces(msgspec.Struct, frozen=True, array_like=True):
    """The embedding and the head whose rows of trained tokens the engine replaces.

    Attributes:
        embedding, head: the engine's names; no head where the model computes no logits.
        words, features: rows of both, and their length.
        most: rows that a slot holds.
        is_tied: whether the head has the embedding's weight.
    """

    embedding: str
    head: str
    words: int
    features: int
    most: int
    is_tied: bool

    @property
    def names(self) -> tuple[str, ...]:
        return (self.embedding, self.head) if self.head else (self.embedding,)


@dataclass(frozen=True, slots=True)
class ModelModules:
    """The modules that an adapter for one model may have.

    Attributes:
        architecture: the model's class in vLLM.
        vllm_version: of the engine with the model.
        places: by the names that `vllm.lora.utils.parse_fine_tuned_lora_name` gives an adapter's tensors.
        renames: the fields of the model's own `WeightsMapper` that rename, as plain values.
        vocabulary: how many words the model has.
        skipped: parts of names that vLLM skips, such as layers for speculation.
        without_model_prefix: whether a name is also looked for without its first `model.` (pooling models).
        experts: the mixtures of experts, by `ModulePlace.module`.
        model_type: `model_type` of the model's configuration, by which Transformers knows the model's names.
        text_prefix: where a multimodal model has its text model, if names are also looked for there (from 0.33).
        unadapted: modules of the model, and parts of modules, that take no adapter.
        copies: by the place of a weight of the checkpoint, the other place that the engine gives the same weight.
        tokens: where rows of trained tokens go; None where nothing replaces rows, for the reason `without_tokens`.
        without_vectors: why no layer computes more than A and B; empty where linear layers do.
    """

    architecture: str
    vllm_version: str
    places: Mapping[str, ModulePlace]
    vocabulary: int | None = None
    renames: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    without_model_prefix: bool = False
    experts: Mapping[str, Experts] = field(default_factory=dict)
    model_type: str = ""
    text_prefix: str = ""
    unadapted: Mapping[str, Unadapted] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    tokens: TokenPlaces | None = None
    without_tokens: str = "as this server's workers replace no rows"
    without_vectors: str = "as this server's workers compute no more"

    def key(self, name: str) -> str | None:
        """Return the name in `places` for weights of this name; None where the model has no such module."""
        return next((key for key in self._spellings(name) if key in self.places), None)

    def place(self, name: str) -> ModulePlace | None:
        """Return the place of weights of this name; None where the model has no such module."""
        return self.places.get(self.key(name) or "")

    def why_unadapted(self, name: str) -> Unadapted | None:
        """Return why weights of this name land nowhere; None where the model has no such module."""
        # Of experts the model lists the module, and an adapter names parts.
        modules = (one for key in self._spellings(name) for one in (key, key.partition(".experts.")[0] + ".experts"))
        return next((self.unadapted[module] for module in modules if module in self.unadapted), None)

    def _spellings(self, name: str) -> Iterator[str]:
        """Yield names in vLLM's order (`LoRAModelManager._get_lora_layer_weights`, vllm/lora/model_manager.py)."""
        yield name
        if self.without_model_prefix:
            yield f"model.{name}"
        if self.text_prefix:
            yield f"{self.text_prefix}.{name}"
            below = name.removeprefix("model.")
            if below != name and not below.startswith(("model.", "lm_head")):
                yield f"{self.text_prefix}.{below}"

    def skips(self, tensor: str) -> bool:
        """Whether vLLM leaves a tensor out (`LoRAModel._should_skip_module`, vllm/lora/lora_model.py, 0.32)."""
        return any(f".{prefix}" in tensor or tensor.startswith(prefix) for prefix in self.skipped)

    def joined(self, other: ModelModules) -> ModelModules:
        """Return both stages of a pipeline together, each with some of the model's layers."""
        return replace(
            self,
            places={**self.places, **other.places},
            experts={**self.experts, **other.experts},
            unadapted={**self.unadapted, **other.unadapted},
            copies={**self.copies, **other.copies},
        )

    def plain(self) -> dict[str, Any]:
        """Return values that JSON and vLLM's messages can carry."""
        return {"format": FORMAT, **msgspec.to_builtins(self)}

    @classmethod
    def of_plain(cls, plain: Any) -> ModelModules:
        """Read the values of `plain`.

        Raises:
            ValueError: another format, or other values.
        """
        if not isinstance(plain, dict):
            raise ValueError("not the modules of a model")  # noqa: TRY004 - of what was read, not of an argument
        if plain.get("format") != FORMAT:
            # A store or a worker of another release may hold an older form.
            raise ValueError(f"format {plain.get('format')!r}, not {FORMAT}")
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not the modules of a model: {error}") from None
