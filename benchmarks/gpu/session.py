"""What each program has: its device, our operators with their tuning table, its time, and its result."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from benchmarks.gpu.compiling import Compilers, Job
from benchmarks.gpu.device import Gpu
from benchmarks.record import circumstances

EVERY_S = 1.0  # how often rows are written; a program that is killed loses no more than this


class Result:
    """One JSON file: what is known at the start, then rows as they come; whole and readable at every moment.

    It says whether it is `complete`, and, where no GPU computed it, that it is a rehearsal.

    Attributes:
        rows: what was added. content: what else the file holds.
    """

    def __init__(self, folder: Path, name: str, facts: Mapping[str, object], *, rehearsal: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{'rehearsal_' if rehearsal else ''}{name}.json"
        self.rows: list[dict[str, object]] = []
        self.content: dict[str, object] = {"rehearsal: not measured": True} if rehearsal else {}
        self.content |= {"complete": False, **circumstances(), **facts}
        self._written_at = 0.0
        self._write()

    def add(self, row: Mapping[str, object]) -> None:
        """Keep a row, print it, and write the file where the last time is long enough ago."""
        self.rows.append(dict(row))
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        if time.monotonic() - self._written_at > EVERY_S:
            self._write()

    def note(self, **facts: object) -> None:
        """Keep facts about the whole, and write the file."""
        self.content |= facts
        self._write()

    def finish(self, **facts: object) -> None:
        """Write the file for the last time."""
        self.note(**facts, complete=True)
        print(self.path, flush=True)

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({**self.content, "rows": self.rows}, indent=1) + "\n")
        part.replace(self.path)
        self._written_at = time.monotonic()


class Session:
    """One program's.

    Attributes:
        table: the tuning table. made: our `Operators` with it, in use in this process.
    """

    def __init__(self, gpu: Gpu, options: Namespace) -> None:
        from lora_plugins.kernels.triton_ops import operators

        self.began = time.monotonic()
        self.gpu, self.out, self.seconds = gpu, options.out, options.seconds
        self.table = gpu.table(options.table)
        operators.use(made := operators.Operators(self.table))
        self.made = made

    @property
    def is_over(self) -> bool:
        """Whether nothing new is to be begun."""
        return time.monotonic() > self.began + self.seconds

    def result(self, name: str, **facts: object) -> Result:
        """Begin the file of results."""
        table = Path(self.table.origin).name
        return Result(self.out, name, {**self.gpu.facts(), "table": table, **facts}, rehearsal=self.gpu.rehearsal)

    def compile_ahead(self, jobs: Sequence[Job], share: float) -> dict[str, object]:
        """Compile what is to be launched, within a share of the time that is left; returns facts about it."""
        began = time.monotonic()
        until = began + share * (self.began + self.seconds - began)
        problems = self._compilers.compile(jobs, until)
        took = round(time.monotonic() - began, 1)
        return {"compile_s": took, "compiled": self._compilers.compiled, "not_compiled": problems}

    @cached_property
    def _compilers(self) -> Compilers:
        return Compilers(self.gpu.capability)  # once: its processes take seconds to begin
