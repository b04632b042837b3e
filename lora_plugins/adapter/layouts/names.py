"""Answers the rules' questions: where a name lands in the engine's model, and the scaling of a rank and an alpha."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import Experts, ModulePlace
from lora_plugins.adapter.weights import LoraPair


class Names:
    """The places of an adapter's names, and the meaning of its scalings."""

    def __init__(self, config: AdapterConfig, model: Model) -> None:
        self._config = config
        self._model = model
        self.exchanged: frozenset[str] = frozenset()  # names of A: see `experts.exchanged`

    @property
    def is_of_old_peft(self) -> bool:
        """Return the configuration's `is_of_old_peft`."""
        return self._config.is_of_old_peft

    def lands(self, pair: LoraPair) -> bool:
        """Whether vLLM reads this pair unchanged, or leaves the pair out on purpose."""
        if self._model.modules.skips(pair.a.name):
            return True
        return self._place(pair.a.name) is not None and pair.a.name not in self.exchanged

    def place(self, module: str, *, is_looked_up: bool = False) -> ModulePlace | None:
        """Return where the pair of a module lands, or None; `is_looked_up`: the pair is of an embedding."""
        name = ".lora_embedding_A" if is_looked_up else ".lora_A.weight"
        return self._place(f"base_model.model.{module}{name}")

    @property
    def has_copies(self) -> bool:
        """Whether the engine gives a weight to two modules."""
        return bool(self._model.modules.copies)

    def copy_of(self, pair: LoraPair) -> str | None:
        """Return the module to which the engine gives the weight of this pair's module too; None without one."""
        try:
            key = self._model.modules.key(self._model.read_name(pair.a.name)[0])
        except ValueError:
            return None
        copy = self._model.modules.copies.get(key or "")
        return copy and f"{pair.module.rpartition('.')[0]}.{copy.rpartition('.')[2]}"

    @property
    def all(self) -> Iterable[str]:
        """The names of all modules of the engine that take an adapter."""
        return self._model.modules.places

    def read(self, module: str) -> str:
        """Return the engine's name for a module; the same name where the engine reads no such name."""
        try:
            return self._model.read_name(f"base_model.model.{module}.lora_A.weight")[0]
        except ValueError:
            return module

    def is_unadapted(self, pair: LoraPair) -> bool:
        """Whether the model has the module of this pair, and the engine does not adapt the module."""
        return self._model.modules.why_unadapted(self.read(pair.module)) is not None

    def experts(self, module: str) -> Experts | None:
        """Return the engine's mixture of experts for an adapter's name of a module."""
        return self._model.modules.experts.get(self.read(module))

    def _place(self, tensor: str) -> ModulePlace | None:
        try:
            return self._model.modules.place(self._model.read_name(tensor)[0])
        except ValueError:
            return None

    def scaling(self, pair: LoraPair) -> float:
        """Return the factor of the pair's product."""
        return self._config.scaling(pair.rank, pair.alpha)

    def alpha_for(self, scaling: float, rank: int) -> float:
        """Return the alpha that gives a pair of this rank this scaling."""
        return scaling * (math.sqrt(rank) if self._config.use_rslora else rank)
