"""Goal of R41, and the README's count of right answers (docs/reference/models.md): `make bench-models`.

What becomes of each kind of adapter on each architecture of the testbed; writes docs/reference/models.md.

Each is served by the real engine on this machine. The raw figures are kept in benchmarks/results/models.json; with
`--page`, only the page is written, from what is kept there; with names of architectures, only these are measured, and
the others' rows stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import mutants, trainers
from benchmarks.record import RESULTS, ROOT, keep, vllm_of
from testbed.architectures import ARCHITECTURES, BY_NAME, Architecture
from testbed.forked_engines import EngineError, ForkedEngines
from testbed.matrix import Row, examine
from testbed.recent_architectures import NOT_RUN

PAGE = ROOT / "docs" / "reference" / "models.md"
KEPT = RESULTS / "models.json"
KINDS = {
    "all-linear": "all-linear",
    "usual": "usual names",
    "attention": "attention",
    "rslora": "rsLoRA",
    "patterns": "patterns",
    "embeddings-head": "embeddings, head",
    "router": "router",
    "experts": "experts",
}
_INTRODUCTION = """# Models

<!-- Written by `make bench-models`, from benchmarks/results/models.json. -->

After this page you know whether your adapter is served on your model's architecture.

{architectures} architectures of vLLM's registry, {pairs} pairs of an architecture and a kind of adapter: {computed}
computed by the real engine, {loaded} loaded only, {refused} refused. Each model is tiny, with random weights in
float32, and PEFT makes each adapter. All adapters of a model run in one batch with the base model, with
`lora_lru_manager` and `lora_kernels`. Ten greedy tokens must be the reference's; of an embedder or a classifier, all
numbers to 0.0001.

The last run, perhaps of some architectures alone: vLLM {vllm} on {cpu}, PEFT {peft}, Transformers {transformers},
{date}, commit `{commit}`.
"""
_LEGEND = """
| cell | what |
|---|---|
| PEFT | served; the answer is PEFT's |
| vLLM | served; the answer is that of vLLM without our plugins, as Transformers has no class that computes the same |
| loaded | served; every tensor is in the real model, and nothing is computed: on CPUs vLLM lacks fused experts with \
adapters, and Gated DeltaNet (Qwen3-Next, Qwen3.5) in float32 |
| \\* | the adapter was converted: vLLM by itself refuses it, or leaves a part out |
| refused | see below |
| no adapter | PEFT refuses to make it |
| · | the model has no such module, or vLLM adapts none |

The kinds: PEFT's `all-linear`; the names of most recipes, without those that the model lacks; attention alone, then
with rsLoRA, then with `rank_pattern` and `alpha_pattern`; embeddings and head, of those that vLLM adapts; a mixture's
router, and its experts, as PEFT's `target_parameters`. Where a mixture is computed, `--lora-target-modules` leaves its
experts out. Whisper transcribes a tone, with `--enable-tower-connector-lora`.
"""


def cell(row: Mapping[str, Any] | None) -> str:
    """What stands in the matrix for a row of the result."""
    if row is None:
        return "·"
    if row["not_made"]:
        return "no adapter"
    if row["refused"]:
        return "refused"
    if row["stored"] or row["is_right"] is False:
        return "**wrong**"
    text = "loaded" if row["is_right"] is None else row["reference"]
    return f"{text} \\*" if row["vllm"] else text


def page(result: Mapping[str, Any]) -> str:
    """The page, from what `benchmarks.record.keep` wrote."""
    rows = [row for row in result["rows"] if row["kind"]]
    by_place = {(row["architecture"], row["kind"]): row for row in rows}
    names = list(dict.fromkeys(row["architecture"] for row in rows))
    versions = result["versions"]
    text = _INTRODUCTION.format(
        architectures=len(names),
        pairs=len([row for row in rows if not row["not_made"]]),
        computed=len([row for row in rows if row["is_right"] is not None]),
        refused=len([row for row in rows if row["refused"]]),
        loaded=len([row for row in rows if cell(row).startswith("loaded")]),
        vllm=vllm_of(result),
        cpu=result["cpu"],
        peft=versions["peft"],
        transformers=versions["transformers"],
        date=result["date"],
        commit=result["commit"],
    )
    lines = [f"| architectures | {' | '.join(KINDS.values())} |", "|---" * (len(KINDS) + 1) + "|"]
    refused_and_more = [*_reasons(rows), *_not_run()]
    with_cells: dict[str, list[str]] = {}  # architectures with equal cells share a row
    for name in names:
        with_cells.setdefault(" | ".join(cell(by_place.get((name, kind))) for kind in KINDS), []).append(name)
    lines += [f"| {'; '.join(alike)} | {cells} |" for cells, alike in with_cells.items()]
    refused_and_more += trainers.section(json.loads(trainers.KEPT.read_text()))
    refused_and_more += mutants.section(json.loads(mutants.KEPT.read_text()))
    return "\n".join([text, *lines, _LEGEND, *refused_and_more]) + "\n"


def _reasons(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    refused = [row for row in rows if row["refused"]]
    if not refused:
        return []
    alike: dict[tuple[str, str], list[str]] = {}
    for row in refused:
        why = BY_NAME[row["architecture"]].refused[row["kind"]]
        names = alike.setdefault((KINDS[row["kind"]], why), [])
        names.append(row["architecture"])
    lines = ["## Refused", "| architectures | adapter | why |", "|---|---|---|"]
    lines += [f"| {'; '.join(names)} | {kind} | {why} |" for (kind, why), names in alike.items()]
    return [*lines, ""]


def _not_run() -> list[str]:
    lines = ["## Not run here", "| architecture | why |", "|---|---|"]
    return [*lines, *(f"| {names} | {why} |" for names, why in NOT_RUN.items()), ""]


def measure(architectures: Sequence[Architecture]) -> list[Row]:
    """Examine these; says which does not run."""
    rows = []
    with tempfile.TemporaryDirectory() as name, ForkedEngines(Path(name) / "engines.log") as engines:
        for architecture in architectures:
            directory = Path(name) / architecture.label.replace(" ", "-")
            directory.mkdir()
            try:
                found = examine(engines, architecture, directory)
            except EngineError as error:
                print(f"{architecture.label} does not run: {str(error)[-1500:]}", file=sys.stderr)
                continue
            print(architecture.label, {row.kind: cell(dataclasses.asdict(row)) for row in found}, file=sys.stderr)
            rows += found
    return rows


def main() -> int:
    order = [one.label for one in ARCHITECTURES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="architecture", help="only these, as LlamaForCausalLM")
    parser.add_argument("--page", action="store_true", help="write the page from what is kept")
    options = parser.parse_args()
    if unknown := set(options.names) - set(order):
        parser.error(f"no such architecture: {', '.join(sorted(unknown))}")
    if not options.page:
        kept = json.loads(KEPT.read_text())["rows"] if options.names else []
        names = options.names or order
        found = [dataclasses.asdict(row) for row in measure([BY_NAME[name] for name in names])]
        rows = found + [row for row in kept if row["architecture"] not in names and row["architecture"] in order]
        keep("models", sorted(rows, key=lambda row: order.index(row["architecture"])))
    text = page(json.loads(KEPT.read_text()))
    PAGE.write_text(text)
    print(text)
    return int("**wrong**" in text)


if __name__ == "__main__":
    sys.exit(main())
