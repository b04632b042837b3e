"""Goal of R8 and R54, no silent fault (docs/reference/models.md): `make bench-mutants`.

What becomes of adapters with one fault each: refused, caught by `lora-plugins compare`, or silent.

Mutants are made of adapters that PEFT has saved (`testbed/mutants.py`). One `vllm serve` with our plugins is asked for
each; what it serves is compared with the unharmed adapter as `lora-plugins compare --peft` does it. Result in
benchmarks/results/mutants.json, which `python -m benchmarks.models.architectures --page` prints in
docs/reference/models.md. With a word, only the faults that have it are made, and nothing is kept.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, keep, vllm_of
from lora_plugins.cli.at_fault import ByPeft, Trained, at_fault
from lora_plugins.cli.compare import AS_BASE, OK, OUT, PROMPTS, UNSEEN, CompletionServer, judge
from lora_plugins.errors import LoRAPluginsError
from testbed.models import build_adapter, build_base
from testbed.mutants import HIDDEN, LAYERS, SOURCES, Mutant, build
from testbed.server import ONE_THREAD, plugged, vllm_server

KEPT = RESULTS / "mutants.json"
TIMES = 2  # places of each fault in each adapter
LIMIT = 5.0  # multiples of the floor, as the command's default
BASES: Mapping[str, Mapping[str, int]] = {
    "another base of equal shapes": {"seed": 1},
    "a base of fewer layers": {"layers": LAYERS - 1},
    "a base of more layers": {"layers": LAYERS + 1},
    "a base of another width": {"hidden": 2 * HIDDEN},
    "a base of another vocabulary": {"vocab": 576},
}
_CODE = re.compile(r"\[(L\d{3})\] (.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Row:
    """One mutant: `outcome` is refused, caught or silent; `says` is the error, or what `compare` says of it."""

    name: str
    fault: str
    source: str
    outcome: str
    code: str = ""
    says: str = ""


class Trainer:
    """What was trained: of each unharmed adapter PEFT's answers, computed once."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._models: dict[str, tuple[ByPeft, list[Trained]]] = {}

    def of(self, source: str) -> tuple[ByPeft, list[Trained]]:
        """The model with the adapter, and its answers to the prompts of the command."""
        if source not in self._models:
            model = ByPeft(self._paths[source], None)
            self._models[source] = model, list(map(model.trained, PROMPTS))
        return self._models[source]


def examined(server: CompletionServer, base: str, mutant: Mutant, trainer: Trainer) -> Row:
    """Ask the server for a mutant, and compare what it serves with what was trained."""
    model, trained = trainer.of(mutant.source)
    row = Row(mutant.name, mutant.fault, mutant.source, "silent")
    try:
        served = [server.logprobs(mutant.name, one.token_ids, by_token=model.trains_head) for one in trained]
    except LoRAPluginsError as error:
        said = _CODE.search(error.found)
        code, text = said.groups() if said else ("none", error.found)
        return dataclasses.replace(row, outcome="refused", code=code, says=text)
    by_base = [server.logprobs(base, one.token_ids, by_token=model.trains_head) for one in trained]
    floor, rows = judge(trained, served, by_base, LIMIT)
    verdicts = {one.verdict for one in rows}
    if OK in verdicts and verdicts <= {OK, UNSEEN}:
        return row
    says = "; ".join(sorted(verdicts))
    if verdicts & {OUT, AS_BASE} and mutant.name.endswith("-0"):  # one place of each fault says enough
        says = at_fault(trained, served, LIMIT * floor[0], model)
    return dataclasses.replace(row, outcome="caught", says=says)


def measure(only: str) -> list[Row]:
    """Make all, and ask for all."""
    import torch

    torch.set_num_threads(1)  # the server has the other core
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        base = build_base(home / "base", hidden=HIDDEN, layers=LAYERS)
        adapters, sources = home / "adapters", {}
        for spec in SOURCES:
            sources[spec.name] = build_adapter(base, home / "trained", spec)
        mutants = [*build(sources, adapters, TIMES, only), *_of_other_bases(home, adapters, sources, only)]
        for source, path in sources.items():
            if path.is_relative_to(home / "trained"):
                adapters.mkdir(exist_ok=True)
                (adapters / source).symlink_to(path)
        env = {
            **plugged("lora_filesystem_resolver,lora_lru_manager,lora_kernels", home / "store", adapters),
            **ONE_THREAD,
            "LORA_PLUGINS_LINK_ROOTS": "/",
        }
        arguments = ("--enable-lora", "--max-lora-rank", "32", "--max-loras", "2", "--max-cpu-loras", "4")
        log = home / "server.log"
        with vllm_server(base, log, arguments=(*arguments, "--num-gpu-blocks-override", "160"), env=env) as running:
            server, trainer = CompletionServer(running.url, 120.0), Trainer(sources)
            served_base = server.base_model()
            for spec in SOURCES:  # else every verdict on a mutant says nothing
                row = examined(server, served_base, Mutant(spec.name, "", spec.name), trainer)
                assert row.outcome == "silent", row
            rows = []
            for mutant in mutants:
                rows.append(examined(server, served_base, mutant, trainer))
                print(*dataclasses.astuple(rows[-1])[1:], file=sys.stderr)
        return rows


def _of_other_bases(home: Path, adapters: Path, sources: dict[str, Path], only: str) -> Iterator[Mutant]:
    for fault, sizes in BASES.items():
        if only and only not in fault:
            continue
        slug = fault.replace(" ", "-")
        base = build_base(home / slug, **{"hidden": HIDDEN, "layers": LAYERS, **sizes})
        for spec in SOURCES:
            name = f"{spec.name}-{slug}"
            sources[name] = build_adapter(base, adapters, dataclasses.replace(spec, name=name))
            yield Mutant(name, fault, name)


def section(result: Mapping[str, Any]) -> list[str]:
    """The part of the page on models, from what `benchmarks.record.keep` wrote."""
    rows = result["rows"]
    outcomes = Counter(row["outcome"] for row in rows)
    versions = result["versions"]
    text = (
        f"{len(rows)} adapters with one fault each, made of adapters of PEFT for a tiny Llama, and asked for"
        f" by name on a real `vllm serve`: {outcomes['refused']} refused by verification, {outcomes['caught']} served"
        f" and caught by [`lora-plugins compare`](../guides/command-line.md#compare), {outcomes['silent']} silent. The"
        " same adapters without a fault are served, and right by `compare`. `make bench-mutants`; vLLM"
        f" {vllm_of(result)}, PEFT {versions['peft']}, {result['cpu']},"
        f" {result['date']}, commit `{result['commit']}`."
    )
    lines = ["## Adapters with a fault", text, "", "| outcome | faults |", "|---|---|"]
    faults: dict[str, list[str]] = {}
    for fault in dict.fromkeys(row["fault"] for row in rows):
        of_fault = [row for row in rows if row["fault"] == fault]
        counted = Counter(_outcome(row) for row in of_fault)
        if len(counted) == 1:
            faults.setdefault(f"all {next(iter(counted))}", []).append(fault)
        else:
            parts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counted.items()))
            faults.setdefault("some of each", []).append(f"{fault} ({parts})")
    order = sorted(faults, key=lambda outcome: (outcome == "some of each", outcome))
    return [*lines, *(f"| {outcome} | {'; '.join(faults[outcome])} |" for outcome in order)]


def _outcome(row: Mapping[str, Any]) -> str:
    return str(row["code"] or {"silent": "**silent**"}.get(row["outcome"], row["outcome"]))


def main(arguments: list[str]) -> int:
    rows = measure(arguments[0] if arguments else "")
    plain = [dataclasses.asdict(row) for row in rows]
    if not arguments:
        keep("mutants", plain)
    print("\n".join(section(json.loads(KEPT.read_text()) if not arguments else _unkept(plain))))
    return int(any(row.outcome == "silent" for row in rows))


def _unkept(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {"rows": list(rows), "versions": {"peft": ""}, "cpu": "", "date": "", "commit": ""}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
