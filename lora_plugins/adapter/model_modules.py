"""The modules of one engine's model that LoRA can adapt, as the engine itself lists them; plain values, no vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

FORMAT = 1


class Kind(StrEnum):
    """What a module is, as far as its adapter's tensors look different."""

    LINEAR = "linear"
    EMBEDDING = "embedding"  # A is looked up in: (rank, vocabulary)
    HEAD = "head"
    EXPERTS = "experts"  # fused experts, a stack of matrices; their sizes are the engine's to check
    CLASSIFIER = "classifier"  # a whole weight in the place of A and B too


@dataclass(frozen=True, slots=True)
class Place:
    """Where one pair of A and B lands; sizes are those of the whole model, not of one worker's part.

    Attributes:
        module: the engine's module, of which this may be one of several parts (`qkv_proj` has `q_proj`, …).
        in_features, out_features: None where only the engine can tell.
        max_out_features: whether fewer outputs fit as well, as with a head that knows fewer words.
    """

    module: str
    kind: Kind = Kind.LINEAR
    in_features: int | None = None
    out_features: int | None = None
    max_out_features: bool = False


@dataclass(frozen=True, slots=True)
class ModelModules:
    """What an adapter for one model may hold.

    Attributes:
        architecture: the model's class in vLLM.
        vllm_version: of the engine that said so.
        places: by the names that `vllm.lora.utils.parse_fine_tuned_lora_name` gives an adapter's tensors.
        renames: the fields of the model's own `WeightsMapper` that rename, as plain values.
        vocabulary: how many words the model has.
        skipped: parts of names of which vLLM reads nothing, such as those of layers for speculation.
        without_model_prefix: whether a name is also looked for without its first `model.` (pooling models).
    """

    architecture: str
    vllm_version: str
    places: Mapping[str, Place]
    vocabulary: int | None = None
    renames: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    without_model_prefix: bool = False

    def place(self, name: str) -> Place | None:
        """Where the weights of this name land; None where the model has no such module."""
        found = self.places.get(name)
        if found is None and self.without_model_prefix:
            found = self.places.get(f"model.{name}")
        return found

    def skips(self, tensor: str) -> bool:
        """Whether vLLM leaves this tensor out (`LoRAModel._should_skip_module`, vllm/lora/lora_model.py, 0.32)."""
        return any(f".{prefix}" in tensor or tensor.startswith(prefix) for prefix in self.skipped)

    def joined(self, other: ModelModules) -> ModelModules:
        """Both stages of a pipeline, of which each has some of the model's layers."""
        return replace(self, places={**self.places, **other.places})

    def plain(self) -> dict[str, Any]:
        """As values that JSON and vLLM's messages can carry."""
        return {
            "format": FORMAT,
            "architecture": self.architecture,
            "vllm_version": self.vllm_version,
            "places": {
                name: [place.module, place.kind.value, place.in_features, place.out_features, place.max_out_features]
                for name, place in self.places.items()
            },
            "vocabulary": self.vocabulary,
            "renames": dict(self.renames),
            "skipped": list(self.skipped),
            "without_model_prefix": self.without_model_prefix,
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> ModelModules:
        """Read what `plain` wrote.

        Raises:
            ValueError: another format, or values that are none of these.
        """
        if plain.get("format") != FORMAT:
            raise ValueError(f"format {plain.get('format')!r}, not {FORMAT}")
        try:
            places = {
                name: Place(module, Kind(kind), inputs, outputs, fewer)
                for name, (module, kind, inputs, outputs, fewer) in plain["places"].items()
            }
            return cls(
                plain["architecture"],
                plain["vllm_version"],
                places,
                plain["vocabulary"],
                plain["renames"],
                tuple(plain["skipped"]),
                bool(plain["without_model_prefix"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the modules of a model: {error}") from None

    @classmethod
    def of_json(cls, text: str) -> ModelModules:
        """Read what `json.dumps(plain())` wrote.

        Raises:
            ValueError: it is no such text.
        """
        loaded = json.loads(text)
        if not isinstance(loaded, dict):
            raise ValueError("not the modules of a model")  # noqa: TRY004 - of the text, not of an argument
        return cls.of_plain(loaded)
