"""One module's part of a batch as a single call of the compiled product."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from lora_plugins.kernels.compiled.library import Group, Product
from lora_plugins.kernels.compiled.panels import Panels, filled

Take = Callable[[tuple[int, ...]], Any]


def step(
    product: Product, panels: Mapping[int, Panels], rows: Mapping[int, Any], inn: int, scale: float, take: Take
) -> Callable[[Any, Any], None]:
    """Return `run(y, x)`, which adds to `y` `[rows, out]` the outputs of these slots for `x` `[rows, inn]`.

    Args:
        product: for the dtype of `x`, `y` and the panels.
        panels: by slot.
        rows: by slot, the rows of the batch with this adapter, int32, ascending.
        inn: columns of `x`.
        scale: factor of the addition.
        take: gives a float32 buffer of a shape, undefined in content, that no other code uses until `run` has returned.
    """
    groups = (Group * len(panels))()
    for group, (slot, found) in zip(groups, panels.items(), strict=True):
        group.rows, group.n_rows = rows[slot].data_ptr(), len(rows[slot])
        group.a, group.rank = found.flat.data_ptr(), found.rank
        group.slices, group.n_slices = ctypes.addressof(found.slices), len(found.slices)
    add, address, n_groups = product.add, ctypes.addressof(groups), len(groups)
    parts = product.parts(address, n_groups, inn)
    sizes = [parts * group.n_rows * filled(product, group.rank) for group in groups]
    buffer = take((sum(sizes),))
    shrunk = buffer.data_ptr()
    for group, size in zip(groups, sizes, strict=True):
        group.shrunk = shrunk
        # 4 bytes: shrunk rows are float32 in every dtype.
        shrunk += 4 * size
    n_rows = 1 + max(int(rows[slot][-1]) for slot in panels)
    width = max(place.first + place.width for found in panels.values() for place in found.slices)
    # The structures hold addresses only; `run` keeps the tensors behind the addresses alive.
    kept = (groups, dict(panels), dict(rows), buffer)

    def run(y: Any, x: Any, _kept: Any = kept) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        x_rows, x_width = x.shape
        y_rows, y_width = y.shape
        # The compiled product checks nothing: a shape beyond these bounds would write outside of `y`.
        if x_rows < n_rows or y_rows < n_rows or x_width != inn or y_width < width or y.stride(1) != 1:
            raise ValueError(
                f"x {tuple(x.shape)} and y {tuple(y.shape)} with strides {y.stride()}: "
                f"the product needs {n_rows} rows, {inn} columns of x and {width} adjacent ones of y"
            )
        add(address, n_groups, inn, parts, scale, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0))

    return run
