"""How the Triton kernels cut their work: a table of plans for each architecture of GPUs, in JSON; pure.

A worker with GPUs reads one table at start (`load_table`). Each call of a kernel asks the table for a plan, by the rows
of the batch and the widths of the layer, and takes the first plan whose limits hold. `tuning/default.json` is for
architectures without a table. `python -m benchmarks.gpu tune` makes a table for an architecture (`sm_90.json`) on
such a device. Tables are part of this package: tests check the content, so reading a table checks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PACKAGED = Path(__file__).with_name("tuning")
CHUNK_SIZES = (16, 32, 64, 128)
# Left out in JSON, so that a table of limits stays readable.
ANY = 1 << 62  # no limit


@dataclass(frozen=True, slots=True)
class ShrinkTile:
    """How a shrink is cut.

    Attributes:
        rank, columns: ranks and input columns of one tile. splits: parts of the input axis.
        rank_programs: programs that share a slot's rank; each loops over its share, and programs beyond the rank end.
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
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles and launches for batches within limits.

    Attributes:
        max_rows, max_in, max_out: the limits; `max_out` is the widest slice.
        chunk: rows of a chunk, an element of `CHUNK_SIZES`.
        shrink, expand: the two launches. fused: a launch in the place of both, or None.
    """

    chunk: int
    shrink: ShrinkTile
    expand: ExpandTile
    fused: FusedTile | None = None
    max_rows: int = ANY
    max_in: int = ANY
    max_out: int = ANY


@dataclass(frozen=True, slots=True)
class Table:
    """The plans for one architecture.

    Attributes:
        origin: the file, for the log.
        dense_min_rows: of a batch of a single slot, from which torch's own products compute (`triton_ops/dense.py`);
            None for never.
    """

    origin: str
    plans: tuple[Plan, ...]
    dense_min_rows: int | None = None

    def plan(self, rows: int, n_in: int, n_out: int) -> Plan:
        """Return the first plan that holds; the last plan has no limits, so a plan is always found."""
        return next(it for it in self.plans if rows <= it.max_rows and n_in <= it.max_in and n_out <= it.max_out)

    def invariant(self) -> Table:
        """Return a table of one plan for every batch, so that a row's result does not depend on other rows."""
        return Table(f"{self.origin}, always alike (VLLM_BATCH_INVARIANT)", self.plans[-1:])


def load_table(architecture: str) -> Table:
    """Return the package's table for `architecture` (such as `sm_90`), or else the default."""
    path = PACKAGED / f"{architecture}.json"
    return read_table(path if path.is_file() else PACKAGED / "default.json")


def read_table(path: Path) -> Table:
    """Read one table, as `python -m benchmarks.gpu tune` writes it."""
    content = json.loads(path.read_text(encoding="utf-8"))
    plans = tuple(_plan(plan) for plan in content["plans"])
    return Table(str(path), plans, content.get("dense_min_rows"))


def as_json(table: Table) -> dict[str, Any]:
    """Return an object for `json.dump` that `read_table` reads."""
    plans = [{key: value for key, value in asdict(plan).items() if value not in (None, ANY)} for plan in table.plans]
    return {"dense_min_rows": table.dense_min_rows, "plans": plans}


def _plan(content: Mapping[str, Any]) -> Plan:
    tiles = {"shrink": ShrinkTile, "expand": ExpandTile, "fused": FusedTile}
    return Plan(**{key: tiles[key](**value) if key in tiles else value for key, value in content.items()})
