"""The result of one part of a GPU call, a file that is whole and readable at every moment, also if the call is cut off.

A result says whether it is `complete`, and, where no GPU computed it, that it is a `rehearsal`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, circumstances

EVERY_S = 1.0  # how often rows are written; a part that is killed loses no more than this


class Result:
    """One JSON file: what is known at the start, then rows as they come.

    Attributes:
        content: what the file holds; a change reaches it with the next `write`.
    """

    def __init__(self, folder: Path, name: str, facts: Mapping[str, object], *, rehearsal: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{'rehearsal_' if rehearsal else ''}{name}.json"
        self.content: dict[str, Any] = {"rehearsal: not measured": True} if rehearsal else {}
        self.content |= {"complete": False, **circumstances(), **facts, "rows": []}
        self._written_at = 0.0
        self.write()

    def add(self, row: Mapping[str, object]) -> None:
        """Keep a row, print it, and write the file where the last time is long enough ago."""
        self.content["rows"].append(dict(row))
        print(_line(row), flush=True)
        if time.monotonic() - self._written_at > EVERY_S:
            self.write()

    def note(self, **facts: object) -> None:
        """Keep facts about the whole, and write the file."""
        self.content |= facts
        self.write()

    def finish(self, **facts: object) -> None:
        """Write the file for the last time."""
        self.note(**facts, complete=True)
        print(self.path, flush=True)

    def write(self) -> None:
        """Replace the file; a reader sees the old content or the new."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        part.replace(self.path)
        self._written_at = time.monotonic()


def options(name: str, seconds: float) -> argparse.ArgumentParser:
    """What every part of a call takes."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--seconds", type=float, default=seconds, help="after this it begins nothing new")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    parser.add_argument("--rehearse", action="store_true", help="tiny, without a GPU; proves that it runs, no more")
    return parser


def _line(row: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in row.items())
