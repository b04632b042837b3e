"""How the Triton kernels cut their work: a table per architecture, JSON, chosen by rows and widths; pure.

A table is a list of plans; the first whose limits hold for the batch is taken. `default.json` holds for every
architecture. A table for one (`sm_90.json`) is made by `python -m benchmarks.gpu tune` on such a device, and comes
from `LORA_PLUGINS_TUNING_DIR` or else from this package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from lora_plugins.errors import InvalidSettings

PACKAGED = Path(__file__).with_name("tuning")
CHUNK_SIZES = (16, 32, 64, 128)
ANY = 1 << 62  # no limit


@dataclass(frozen=True, slots=True)
class ShrinkTile:
    """How a shrink is cut.

    Attributes:
        rank: ranks of one tile. columns: input columns of one tile. splits: parts of the input axis.
        rank_programs: programs that share a slot's rank; those beyond it leave, each loops over what is left to it.
        warps, stages: Triton's.
    """

    rank: int = 16
    columns: int = 128
    splits: int = 1
    rank_programs: int = 2
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class ExpandTile:
    """How an expand is cut: ranks and output columns of one tile; Triton's warps and stages."""

    rank: int = 16
    columns: int = 128
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True, slots=True)
class FusedTile:
    """How a fused shrink and expand is cut: ranks, input columns and output columns of one tile; warps and stages."""

    rank: int = 16
    columns_in: int = 128
    columns_out: int = 256
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run for batches within limits.

    Attributes:
        max_rows, max_in, max_out: the limits; `max_out` is the widest slice.
        chunk: rows of one chunk, one of `CHUNK_SIZES`.
        shrink, expand: the two launches. fused: one launch in their place, or None.
    """

    chunk: int
    shrink: ShrinkTile
    expand: ExpandTile
    fused: FusedTile | None = None
    max_rows: int = ANY
    max_in: int = ANY
    max_out: int = ANY

    def holds(self, rows: int, n_in: int, n_out: int) -> bool:
        """Whether the batch is within the limits."""
        return rows <= self.max_rows and n_in <= self.max_in and n_out <= self.max_out


@dataclass(frozen=True, slots=True)
class Table:
    """The plans for one architecture, and the number of rows from which one slot alone takes the dense path.

    Attributes:
        origin: the file, for the log. dense_min_rows: None for never.
    """

    origin: str
    plans: tuple[Plan, ...]
    dense_min_rows: int | None = None

    def plan(self, rows: int, n_in: int, n_out: int) -> Plan:
        """The first plan that holds; the last one has no limits, so there is one."""
        return next(plan for plan in self.plans if plan.holds(rows, n_in, n_out))

    def invariant(self) -> Plan:
        """One plan for every batch, so that a row's result does not depend on the rows beside it."""
        return self.plans[-1]


def load_table(architecture: str, directory: Path | None = None) -> Table:
    """Read the table for `architecture` (such as `sm_90`) from the user's directory, the package, or the default.

    Raises:
        InvalidSettings: a file that is no such table.
    """
    for path in (directory and directory / f"{architecture}.json", PACKAGED / f"{architecture}.json"):
        if path and path.is_file():
            return read_table(path)
    return read_table(PACKAGED / "default.json")


def read_table(path: Path) -> Table:
    """Read one table.

    Raises:
        InvalidSettings: it cannot be read, or something in it cannot be right.
    """
    try:
        return _table(str(path), json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidSettings(
            f"the tuning table {path}: {type(error).__name__}: {error}",
            expected="a table as python -m benchmarks.gpu tune writes it",
            remedy="make it again, or take it out of LORA_PLUGINS_TUNING_DIR",
        ) from error


def as_json(table: Table) -> dict[str, Any]:
    """What `read_table` reads, as an object for `json.dump`."""
    plans = []
    for plan in table.plans:
        whole = asdict(plan)
        plans.append({key: value for key, value in whole.items() if value not in (None, ANY)})
    return {"dense_min_rows": table.dense_min_rows, "plans": plans}


def _table(origin: str, content: Mapping[str, Any]) -> Table:
    plans = tuple(_plan(plan) for plan in content["plans"])
    if not plans or not plans[-1].holds(ANY, ANY, ANY):
        raise ValueError("the last plan must have no limits")
    dense = content.get("dense_min_rows")
    if dense is not None and (not isinstance(dense, int) or dense < 1):
        raise ValueError(f"dense_min_rows is {dense!r}")
    return Table(origin, plans, dense)


def _plan(content: Mapping[str, Any]) -> Plan:
    known = {field.name for field in fields(Plan)}
    if not content.keys() <= known:
        raise ValueError(f"unknown {sorted(content.keys() - known)}")
    limits = {name: int(content[name]) for name in ("max_rows", "max_in", "max_out") if name in content}
    if content["chunk"] not in CHUNK_SIZES:
        raise ValueError(f"chunk is {content['chunk']!r}, not one of {CHUNK_SIZES}")
    fused = content.get("fused")
    if fused is not None and content["chunk"] != CHUNK_SIZES[0]:
        raise ValueError(f"fused with chunks of {content['chunk']} rows; it is for the smallest only")
    return Plan(
        chunk=content["chunk"],
        shrink=_tile(ShrinkTile, content["shrink"]),
        expand=_tile(ExpandTile, content["expand"]),
        fused=None if fused is None else _tile(FusedTile, fused),
        **limits,
    )


_T = TypeVar("_T", ShrinkTile, ExpandTile, FusedTile)
_ANY_COUNT = {"splits", "rank_programs", "stages"}  # the others are powers of 2


def _tile(kind: type[_T], content: Mapping[str, Any]) -> _T:
    tile = kind(**content)
    for name, value in asdict(tile).items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}")
        if name in _ANY_COUNT:
            continue
        if value & (value - 1):
            raise ValueError(f"{name} is {value}, which is no power of 2")
        if name != "warps" and value < 16:
            raise ValueError(f"{name} is {value}; the tensor cores want 16 or more")
    return tile
