"""What the rules ask: where a name lands in the engine's model, and what a rank and an alpha scale by."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import Experts, Place
from lora_plugins.adapter.weights import LoraPair


class Names:
    """Where the names of one adapter land, and what its scalings mean."""

    def __init__(self, config: AdapterConfig, model: Model) -> None:
        self._config = config
        self._model = model

    def lands(self, pair: LoraPair) -> bool:
        """Whether vLLM reads this pair as it is, or leaves it out on purpose."""
        if self._model.modules.skips(pair.a.name):
            return True
        return self._place(pair.a.name) is not None

    def place(self, module: str, *, is_looked_up: bool = False) -> Place | None:
        """Where the pair of this module lands, under the names that PEFT gives it."""
        name = ".lora_embedding_A" if is_looked_up else ".lora_A.weight"
        return self._place(f"base_model.model.{module}{name}")

    @property
    def all(self) -> Iterable[str]:
        """The names of all modules of the engine that take an adapter."""
        return self._model.modules.places

    def read(self, module: str) -> str:
        """The engine's name for a module; the name as it is where the engine reads none of it."""
        try:
            return self._model.read_name(f"base_model.model.{module}.lora_A.weight")[0]
        except ValueError:
            return module

    def is_unadapted(self, pair: LoraPair) -> bool:
        """Whether the model has the module of this pair, and the engine does not adapt it."""
        return self._model.modules.why_unadapted(self.read(pair.module)) is not None

    def experts(self, module: str) -> Experts | None:
        """The mixture of experts that the engine has under this name of an adapter's."""
        return self._model.modules.experts.get(self.read(module))

    def _place(self, tensor: str) -> Place | None:
        try:
            return self._model.modules.place(self._model.read_name(tensor)[0])
        except ValueError:
            return None

    def scaling(self, pair: LoraPair) -> float:
        """What the pair's product is multiplied by."""
        return self._config.scaling(pair.rank, pair.alpha)

    def alpha_for(self, scaling: float, rank: int) -> float:
        """The alpha with which a pair of this rank has this scaling."""
        return scaling * (math.sqrt(rank) if self._config.use_rslora else rank)
