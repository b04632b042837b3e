"""How a tensor is made of other tensors, as values that can be sent to another process.

Each move takes arrays of the sources, in their shapes, as unsigned integers of their elements' width, and returns an
array of the new shape: elements are moved, none is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Same(msgspec.Struct, frozen=True, tag=True):
    """The only source, unchanged."""

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the module."""
        return arrays[0]


class Rows(msgspec.Struct, frozen=True, tag=True):
    """Some rows of the only source."""

    begin: int
    count: int

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the module."""
        return arrays[0][self.begin : self.begin + self.count]


class Stacked(msgspec.Struct, frozen=True, tag=True):
    """All sources' rows, one after the other."""

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the module."""
        import numpy as np

        return np.concatenate(arrays)


class OnDiagonal(msgspec.Struct, frozen=True, tag=True):
    """Each source in its own block (first row, rows, first column, columns), and zeros around."""

    shape: tuple[int, int]
    blocks: tuple[tuple[int, int, int, int], ...]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the module."""
        import numpy as np

        made = np.zeros(self.shape, arrays[0].dtype)  # the bits of 0.0 in every floating-point dtype
        for array, (row, rows, column, columns) in zip(arrays, self.blocks, strict=True):
            made[row : row + rows, column : column + columns] = array
        return made


class Zeros(msgspec.Struct, frozen=True, tag=True):
    """Zeros of the source's dtype."""

    shape: tuple[int, int]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the module."""
        import numpy as np

        return np.zeros(self.shape, arrays[0].dtype)


class ColumnsOfExpert(msgspec.Struct, frozen=True, tag=True):
    """An expert's columns and some rows (first, end, step) of B of all experts, in which experts alternate."""

    expert: int
    count: int
    rows: tuple[int, int, int]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the module."""
        return arrays[0].reshape(len(arrays[0]), -1, self.count)[slice(*self.rows), :, self.expert]


class StackedA(msgspec.Struct, frozen=True, tag=True):
    """A of all experts: each source at its place (expert, first rank); the shape is (experts, ranks, inputs)."""

    shape: tuple[int, int, int]
    places: tuple[tuple[int, int], ...]
    each: int

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the module."""
        import numpy as np

        made = np.zeros(self.shape, arrays[0].dtype)
        for (expert, begin), array in zip(self.places, arrays, strict=False):
            made[expert, begin : begin + self.each] = array
        return made.reshape(-1, self.shape[2])


class StackedB(msgspec.Struct, frozen=True, tag=True):
    """B of all experts, in which experts alternate: each source at its place (expert, first rank) and own rows."""

    shape: tuple[int, int, int]
    places: tuple[tuple[int, int, tuple[int, int, int]], ...]
    each: int

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the module."""
        import numpy as np

        made = np.zeros(self.shape, arrays[0].dtype)
        for (expert, begin, rows), array in zip(self.places, arrays, strict=False):
            made[slice(*rows), begin : begin + self.each, expert] = array
        return made.reshape(self.shape[0], -1)


class OfExpert(msgspec.Struct, frozen=True, tag=True):
    """The source in another shape with other axes: of all experts, or some rows (first, end, step) of one."""

    shape: tuple[int, int, int]
    axes: tuple[int, int, int]
    expert: int | None = None
    rows: tuple[int, int, int] = (0, 0, 1)

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """See the module."""
        turned = arrays[0].reshape(self.shape).transpose(self.axes)
        return turned if self.expert is None else turned[self.expert][slice(*self.rows)]


Move = Same | Rows | Stacked | OnDiagonal | Zeros | ColumnsOfExpert | StackedA | StackedB | OfExpert
