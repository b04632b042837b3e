"""The values of a conversion: tensors that are still to be made (`NewTensor`), by moves of other tensors' elements.

Rules (`fused.py`, `experts.py`, `mixing.py`) make these values in the API server. A move is sent to the reading process
and called there on the sources' elements (`writing.py`). `Part` and `Placed` move bits and keep the dtype; `Scaled`, of
AdaLoRA, and `Joined`, of mixtures, compute in float32. `Names` says to a rule where an adapter's names land.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import Experts, ModulePlace
from lora_plugins.adapter.safetensors_header import TensorInfo, floats_of
from lora_plugins.adapter.weights import PREFIX, LoraPair

# Some indices of an axis: the first, the end, the step.
Slice = tuple[int, int, int]


class Part(msgspec.Struct, frozen=True, tag=True):
    """A part of a single source: slices of the first axes, after the source has another shape and order of axes.

    A move can be sent to another process. It takes arrays of the sources, as unsigned integers of their elements'
    width, and returns an array with the elements of the new tensor in order.
    """

    slices: tuple[Slice, ...] = ()
    shape: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()

    def __call__(self, arrays: Sequence[Any]) -> Any:
        turned = arrays[0].reshape(self.shape).transpose(self.axes) if self.shape else arrays[0]
        return turned[_index(self.slices)]


class Placed(msgspec.Struct, frozen=True, tag=True):
    """Zeros of a shape, and each source in its own place among them: slices of the first axes; as `Part`."""

    shape: tuple[int, ...]
    places: tuple[tuple[Slice, ...], ...] = ()

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the class."""
        import numpy as np

        made = np.zeros(self.shape, arrays[0].dtype)  # the bits of 0.0 in every floating-point dtype
        # Without a place, the only source gives its dtype.
        for place, array in zip(self.places, arrays, strict=False):
            part = made[_index(place)]
            part[...] = array.reshape(part.shape)
        return made


class Scaled(msgspec.Struct, frozen=True, tag=True):
    """A move of sources that are first multiplied by columns of factors, the second half of the sources; in float32.

    Attributes:
        dtypes: of all sources.
    """

    move: Part | Placed
    dtypes: tuple[str, ...]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        wide = _wide(arrays, self.dtypes)
        half = len(wide) // 2
        return self.move([(a * e).view("<u4") for a, e in zip(wide[:half], wide[half:], strict=True)])


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Sources of these dtypes, each times its own factor, side by side along an axis, in float32; as `Part`."""

    axis: int
    dtypes: tuple[str, ...]
    factors: tuple[float, ...]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the class."""
        import numpy as np

        wide = zip(_wide(arrays, self.dtypes), self.factors, strict=True)
        scaled = [values * np.float32(factor) for values, factor in wide]
        return np.concatenate(scaled, axis=self.axis)


def _wide(arrays: Sequence[Any], dtypes: Sequence[str]) -> list[Any]:
    return [floats_of(*of_one).astype("<f4", copy=False) for of_one in zip(arrays, dtypes, strict=True)]


Move = Part | Placed | Scaled | Joined


def _index(slices: Sequence[Slice]) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in slices)


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that is not in the adapter's files: its name, dtype and shape (`info`), its sources and its making."""

    info: TensorInfo
    sources: tuple[TensorInfo, ...]
    make: Move


@dataclass(frozen=True, slots=True)
class NewPair:
    """A pair as the engine wants the pair, with the rank and alpha that keep its product."""

    module: str
    a: NewTensor
    b: NewTensor
    rank: int
    alpha: float
    is_looked_up: bool = False

    @property
    def pair(self) -> LoraPair:
        """Return the pair of the file that is still to be written."""
        return LoraPair(self.module, self.a.info, self.b.info, self.rank, self.alpha, self.is_looked_up)


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


# The pairs that a rule takes, the pairs that the rule makes, and a description.
Change = tuple[list[LoraPair], list[NewPair], str]


def new_pair(
    module: str,
    a: tuple[Sequence[TensorInfo], Sequence[int], Move],
    b: tuple[Sequence[TensorInfo], Sequence[int], Move],
    rank: int,
    alpha: float,
    *,
    is_looked_up: bool = False,
) -> NewPair:
    """Return a pair for `module`; A and B are each given by sources (of one dtype unless `Joined`), shape, and move."""
    name_a, name_b = LoraPair(module, a[0][0], b[0][0], rank, alpha, is_looked_up).names
    return NewPair(module, _tensor(name_a, *a), _tensor(name_b, *b), rank, alpha, is_looked_up)


def _tensor(name: str, sources: Sequence[TensorInfo], shape: Sequence[int], make: Move) -> NewTensor:
    dtype = "F32" if isinstance(make, Joined) else sources[0].dtype
    return NewTensor(TensorInfo(name, dtype, tuple(shape), 0, 0), tuple(sources), make)
