"""Tensors that are made of an adapter's own tensors, by moving elements without arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weights import LoraPair

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
        """See the class."""
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


Move = Part | Placed


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
    """Return a pair for `module`; A and B are each given by sources (of one dtype), shape, and move."""
    name_a, name_b = LoraPair(module, a[0][0], b[0][0], rank, alpha, is_looked_up).names
    return NewPair(module, _tensor(name_a, *a), _tensor(name_b, *b), rank, alpha, is_looked_up)


def _tensor(name: str, sources: Sequence[TensorInfo], shape: Sequence[int], make: Move) -> NewTensor:
    return NewTensor(TensorInfo(name, sources[0].dtype, tuple(shape), 0, 0), tuple(sources), make)
