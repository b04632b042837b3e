"""All programs in one call: one that hangs or fails leaves the others their time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import cases

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "kernels-gpu.md"
MARK = "<!-- table: written by tests/benchmarks/gpu/test_parts.py -->"


def test_a_part_that_hangs_ends_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_GRACE_S", 0.2)

    def command(part: str, seconds: float) -> Sequence[str]:
        hangs = "import time; time.sleep(60)" if part == "streams" else ""
        return [sys.executable, "-c", f"open({str(tmp_path / part)!r}, 'w').write('{seconds}')\n{hangs}"]

    began = time.monotonic()
    assert not program.run_parts(12.0, command)
    assert time.monotonic() - began < 12.0
    given = {part: float((tmp_path / part).read_text()) for part in program.PART_SECONDS}
    assert given["check"] > given["streams"]
    assert sum(given.values()) > 12.0 * program.BEGINS_NOTHING_NEW, "what a part leaves goes to the next"


def test_a_part_that_fails_fails_the_call_after_the_others(tmp_path: Path) -> None:
    def command(part: str, _: float) -> Sequence[str]:
        status = int(part == "streams")
        return [sys.executable, "-c", f"open({str(tmp_path / part)!r}, 'w'); raise SystemExit({status})"]

    assert not program.run_parts(60.0, command)
    assert {file.name for file in tmp_path.iterdir()} == {*program.PART_SECONDS}
    assert program.run_parts(60.0, lambda part, seconds: [sys.executable, "-c", ""])


def test_the_command_line_runs_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, Sequence[str]]] = []
    monkeypatch.setattr(
        program, "run_parts", lambda seconds, command: bool(asked.append((seconds, command("check", 9.0))))
    )
    assert program.main(["all", "--seconds", "450", "--out", str(tmp_path), "--rehearse"]) == 1
    (seconds, command), *_ = asked
    assert seconds == 450.0
    assert [*command][-7:] == ["benchmarks.gpu", "check", "--seconds", "9", "--out", str(tmp_path), "--rehearse"]


def test_the_page_says_what_each_side_reads() -> None:
    _, mark, after = PAGE.read_text().partition(MARK)
    assert mark
    assert after.lstrip("\n").partition("\n\n")[0] == table()


def table() -> str:
    """What the four layers of a layer of an 8B model move, theirs by ours, with 1, 4 and 16 of 64 slots active."""
    lines = ["| rank / slots' | rows | 1 active | 4 active | 16 active |", "|---|---|---|---|---|"]
    for rank, slot_rank in ((8, 64), (16, 64), (16, 128)):
        for rows in (1, 16, 64, 256):
            cells = []
            for adapters in (1, 4, 16):
                layers = [
                    cases.Case("Llama-8B", layer, rows, adapters, rank, slot_rank, 64) for layer in cases.LLAMA_8B
                ]
                theirs, ours = (
                    sum(of(one) for one in layers) for of in (cases.Case.slot_bytes, cases.Case.floor_bytes)
                )
                said = f"{theirs / 1e6:.1f} : {ours / 1e6:.1f} = **{theirs / ours:.1f}**"
                cells.append(said if adapters <= rows else "")
            lines.append(f"| {rank} / {slot_rank} | {rows} | {' | '.join(cells)} |")
    return "\n".join(lines)
