"""Answers the rules' questions: where a name lands in the engine's model."""

from __future__ import annotations

from dataclasses import dataclass

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import Experts, ModulePlace
from lora_plugins.adapter.weights import PREFIX, LoraPair


@dataclass(slots=True)
class Names:
    """The places of an adapter's names.

    Attributes:
        exchanged: names of A, see `experts.exchanged`.
    """

    config: AdapterConfig
    model: Model
    exchanged: frozenset[str] = frozenset()

    def lands(self, pair: LoraPair) -> bool:
        """Whether vLLM reads this pair unchanged, or leaves the pair out on purpose."""
        if self.model.modules.skips(pair.a.name):
            return True
        return self._place(pair.a.name) is not None and pair.a.name not in self.exchanged

    def place(self, module: str, *, is_looked_up: bool = False) -> ModulePlace | None:
        """Return where the pair of a module lands, or None; `is_looked_up`: the pair is of an embedding."""
        return self._place(f"{PREFIX}{module}{'.lora_embedding_A' if is_looked_up else '.lora_A.weight'}")

    def copy_of(self, pair: LoraPair) -> str | None:
        """Return the module to which the engine gives the weight of this pair's module too; None without one."""
        key = self.model.modules.key(self.model.read(pair.a.name) or "")
        copy = self.model.modules.copies.get(key or "")
        return copy and f"{pair.module.rpartition('.')[0]}.{copy.rpartition('.')[2]}"

    def read(self, module: str) -> str:
        """Return the engine's name for a module; the same name where the engine reads no such name."""
        return self.model.read(f"{PREFIX}{module}.lora_A.weight") or module

    def experts(self, module: str) -> Experts | None:
        """Return the engine's mixture of experts for an adapter's name of a module."""
        return self.model.modules.experts.get(self.read(module))

    def _place(self, tensor: str) -> ModulePlace | None:
        return self.model.modules.place(self.model.read(tensor) or "")
