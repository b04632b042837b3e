"""The functions and structures of `lora.c`, as Python calls them; pure.

`build.py` loads the library once in a process, and makes a `Product` of it; `panels.py` fills the structures and calls
the functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


# Fields in the order and with the widths of the C structures: lora.c reads the memory directly.
class Slice(ctypes.Structure):
    """`struct slice` of `lora.c`."""

    _fields_ = (
        ("b", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("top", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("g", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
    )


class Group(ctypes.Structure):
    """`struct group` of `lora.c`."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("n_rows", ctypes.c_int64),
        ("a", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("n_slices", ctypes.c_int64),
        ("slices", ctypes.c_void_p),
        ("shrunk", ctypes.c_void_p),
    )


class Work(ctypes.Structure):
    """`struct work` of `lora.c`; `add` sets `x` and `y` in a copy."""

    _fields_ = (
        ("groups", ctypes.c_void_p),
        ("n_groups", ctypes.c_int64),
        ("inn", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Product:
    """The compiled `y += scale * B A x` for one dtype of x, y and the weights.

    Attributes:
        add: `add(work, x, y)`, pointers; unchecked.
        parts: `parts(work)`, into how many parts the sum of `A x` is best divided; each group's `shrunk` has as many
            parts.
        pack: `pack(from, stride, columns, depth, panels, first, total)` writes columns into panels; unchecked.
        panel: columns of a full panel of A or B. lanes: columns of a narrow panel; panels are filled up to a multiple.
        pair: elements of one column that lie side by side in a panel.
        threads: `threads()`, the number of threads that the product would use now.
    """

    add: Any
    parts: Any
    pack: Any
    threads: Callable[[], int]
    panel: int
    lanes: int
    pair: int


def product_of(loaded: ctypes.CDLL) -> Product:
    """Return the functions of a library compiled from `lora.c`.

    Raises:
        AttributeError: the library has another source.
    """
    # ctypes takes every argument for a C int without argtypes: addresses above 2³¹ would be cut.
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.lora_add.argtypes = [pointer, pointer, pointer]
    loaded.lora_add.restype = None
    loaded.lora_parts.argtypes = [pointer]
    loaded.lora_pack.argtypes = [pointer, number, number, number, pointer, number, number]
    loaded.lora_pack.restype = None
    for count in (
        loaded.lora_parts, loaded.lora_threads, loaded.lora_panel, loaded.lora_lanes, loaded.lora_pair,
    ):  # fmt: skip
        count.restype = number
    return Product(
        loaded.lora_add, loaded.lora_parts, loaded.lora_pack, loaded.lora_threads,
        panel=loaded.lora_panel(), lanes=loaded.lora_lanes(), pair=loaded.lora_pair(),
    )  # fmt: skip
