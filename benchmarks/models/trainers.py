"""Goal of R51 (docs/reference/models.md): `make bench-trainers`.

What becomes of adapters as trainers write them (testbed/trainers), on stock vLLM and with our plugins.

A Llama's and a multimodal model's adapters are asked for by name on two real `vllm serve`, and compared with PEFT's
answers to the adapter in PEFT's own form, in multiples of the noise floor, which is the base model's own difference;
those with experts are loaded into the real model, as fused experts with adapters need a GPU. Result in
benchmarks/results/trainers.json, which `python -m benchmarks.models.architectures --page` prints in
docs/reference/models.md. With a word, only the adapters whose names have it are made, and nothing is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.record import RESULTS, keep, vllm_of
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.cli.at_fault import ByPeft
from lora_plugins.cli.compare import CompletionServer
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import Settings
from testbed import multimodal
from testbed.architectures import BY_NAME
from testbed.forked_engines import ForkedEngines
from testbed.model_builder import PROMPT as IDS
from testbed.models import build_base
from testbed.server import ONE_THREAD, plugged, vllm_server
from testbed.trainers import shapes
from testbed.trainers.adapters import HIDDEN, LAYERS, PEFT, Base, copied
from testbed.trainers.forms import peft
from testbed.trainers.table import Row, rows, write

KEPT = RESULTS / "trainers.json"
LIMIT = 2.0  # multiples of the noise floor
FLOOR = 1e-5  # float32's own rounding, in logarithms of probabilities, as in `lora-plugins compare`
EQUAL = 1e-4  # of logarithms of probabilities, in float32
PLUGINS = "lora_filesystem_resolver,lora_lru_manager,lora_kernels"
SERVED, LOADED = "served as trained", "loaded whole"
AS_BASE, IN_PART = "**accepted, and answers as the base model**", "**accepted, and served otherwise than trained**"
BY_INSPECT = "404; `inspect`: "
UNKNOWN = "accepted"  # and PEFT itself does not load it
Answer = Sequence[float]


@dataclasses.dataclass(frozen=True)
class Found:
    """One adapter: what stock vLLM makes of it, and what we do; `times` is in multiples of the noise floor."""

    name: str
    trainer: str
    version: str
    source: str
    what: str
    base: str
    stock: str
    ours: str
    is_right: bool
    times: float | None = None


@dataclasses.dataclass
class Right:
    """What the answers should be: by kind of adapter, and the base model's; None where nobody can say."""

    of_base: Answer
    of_shape: dict[str, Answer | None]
    with_head: frozenset[str] = frozenset()


def by_peft(base: Path, home: Path, wanted: Iterable[Row]) -> Right:
    """PEFT's answers to each kind of adapter, in PEFT's own form."""
    answers: dict[str, Answer | None] = {}
    plain: Answer = ()
    heads = set()
    for row in wanted:
        if row.shape.what in answers:
            continue
        directory = write(peft(row.right()), home / "right" / row.shape.what.replace(" ", "-"))
        try:
            model = ByPeft(directory, str(base))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            print(f"PEFT does not load {row.shape.what}: {str(error)[:200]}", file=sys.stderr)
            answers[row.shape.what] = None
            continue
        answers[row.shape.what] = model.logprobs(IDS)
        if model.trains_head:
            heads.add(row.shape.what)
        with model._model.disable_adapter():
            plain = plain or model.logprobs(IDS)
    return Right(plain, answers, frozenset(heads))


@contextlib.contextmanager
def server(base: Path, home: Path, plugins: str) -> Iterator[str]:
    """One `vllm serve` with these plugins; its URL."""
    env = {**plugged(plugins, home / "store", home / "adapters"), **ONE_THREAD}
    arguments = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--num-gpu-blocks-override", "160")
    log = home / f"server-{'ours' if plugins else 'stock'}.log"
    with vllm_server(base, log, arguments=("--max-model-len", "128", *arguments), env=env, is_forking=True) as running:
        yield running.url


def asked(url: str, adapter: Path, *, is_stock: bool, by_token: bool) -> Answer | str:
    """The answer with an adapter, or why there is none."""
    if is_stock:
        body = {"lora_name": adapter.name, "lora_path": str(adapter)}
        answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=120)
        if answer.is_error:
            return shortened(answer.text)
    try:
        return CompletionServer(url, 120.0).logprobs(adapter.name, IDS, by_token=by_token)
    except LoRAPluginsError:  # of which only a beginning is kept
        body = {"model": adapter.name, "prompt": IDS, "max_tokens": 1}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120).text


def far(some: Iterable[float], others: Iterable[float]) -> float:
    """The largest difference of two rows of numbers."""
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def shortened(text: str) -> str:
    """The finding, without remedies and temporary folders."""
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/[^\s,;:'\"]*/", "", text)
    found = re.search(r"(\[L\d{3}\]).*? found (.*?)(?: \(base model|; expected|, such as)", text, re.DOTALL)
    if found:
        return f"{found[1]} {found[2]}"
    message = re.search(r"[\"']message[\"']: *[\"'](.*?)[\"'],", text, re.DOTALL)
    words = " ".join((message[1] if message else text).split())
    cause = words.rpartition("<path>, ")[2]  # behind vLLM's own account of the call
    return cause[:100] + ("…" if len(cause) > 100 else "")


def judged(answer: Answer | str, right: Right, row: Row, plain: Answer, floor: float) -> tuple[str, float | None]:
    """What an answer is, and how far from the right one."""
    if isinstance(answer, str):
        how = f"refused: {BY_INSPECT}" if answer.startswith(BY_INSPECT) else "refused: "
        return how + shortened(answer), None
    if far(answer, plain) <= EQUAL:
        return AS_BASE, None
    wanted = right.of_shape.get(row.shape.what)
    if wanted is None:
        return UNKNOWN, None
    times = far(answer, wanted) / floor
    return (SERVED if times <= LIMIT else IN_PART), times


def on_servers(home: Path, base: Path, right: Right | None, wanted: Sequence[Row]) -> Iterator[Found]:
    """Ask both servers for each; without `right`, the same server's answer to the adapter in PEFT's form is right."""
    adapters = home / "adapters"
    for row in wanted:
        row.write(adapters)
    said: dict[str, dict[str, tuple[str, float | None, str]]] = {}
    for plugins in ("", PLUGINS):
        with server(base, home, plugins) as url:
            client = CompletionServer(url, 120.0)
            model = client.base_model()
            plain = client.logprobs(model, IDS), client.logprobs(model, IDS, by_token=True)
            of_peft = right or Right(plain[0], {})
            if right is None:
                below = write(peft(shapes.BELOW.make()), adapters / "below")
                answer = asked(url, below, is_stock=not plugins, by_token=False)
                assert not isinstance(answer, str), answer
                of_peft.of_shape |= {shapes.BELOW.what: answer, shapes.TEXT_ALONE.what: answer}
            floor = max(FLOOR, *(far(one, of_peft.of_base) for one in plain))
            for row in wanted:
                by_token = row.shape.what in of_peft.with_head
                answer = asked(url, adapters / row.name, is_stock=not plugins, by_token=by_token)
                if plugins and isinstance(answer, str) and "[L" not in answer:
                    answer = _inspected(adapters / row.name)
                verdict = judged(answer, of_peft, row, plain[by_token], floor)
                said.setdefault(row.name, {})[plugins] = *verdict, answer if isinstance(answer, str) else ""
    for row in wanted:
        ours, times, why = said[row.name][PLUGINS]
        is_right = bool(re.search(row.refused, why, re.DOTALL)) if row.refused else ours == SERVED
        yield _found(row, said[row.name][""][0], ours, is_right, times)


def _inspected(adapter: Path) -> str:
    """What `lora-plugins inspect` says of a directory that has nothing by which a server finds it: 404 to clients."""
    try:
        verify_adapter(adapter, None, Settings())
    except LoRAPluginsError as error:
        return f"{BY_INSPECT}{error}"
    return ""


def loaded(home: Path, wanted: Sequence[Row]) -> Iterator[Found]:
    """Load each into the real model with experts, by vLLM's own loading and after our resolver."""
    with ForkedEngines(home / "engines.log") as engines:
        with engines.engine(BY_NAME["Qwen3MoeForCausalLM"], home) as engine:
            engine.call("build")
        with engines.engine(BY_NAME["Qwen3MoeForCausalLM"], home) as engine:
            engine.call("make")
            for row in wanted:
                row.write(home / "adapters")
                ours, stock, stored = engine.call("verdict", row.name)
                verdict = f"refused: {shortened(ours)}" if ours else LOADED if not stored else f"**{stored[:100]}**"
                is_right = bool(re.search(row.refused, ours, re.DOTALL)) if row.refused else verdict == LOADED
                yield _found(row, _of_stock(stock), verdict, is_right)


def _of_stock(said: str) -> str:
    if not said:
        return LOADED
    if said.startswith(("not loaded", "not merged")) or "Error" in said:
        return f"refused: {shortened(said.partition(': ')[2])}"
    return f"**accepted, and loaded in part**: {said[:60].partition('[')[0].rstrip(' :')}"


def _found(row: Row, stock: str, ours: str, is_right: bool, times: float | None = None) -> Found:
    trainer = row.trainer
    base = row.shape.base.value
    return Found(row.name, trainer.name, trainer.version, trainer.source, row.what, base, stock, ours, is_right, times)


def build_llama(home: Path) -> Path:
    """The base model; its embeddings and head are those that PEFT saves copies of."""
    from safetensors.torch import load_file, save_file
    from torch import from_numpy

    base = build_base(home / "base", hidden=HIDDEN, layers=LAYERS)
    tensors = load_file(base / "model.safetensors")
    for module in ("model.embed_tokens", "lm_head"):
        tensors[f"{module}.weight"] = from_numpy(copied(module)[f"{PEFT}{module}.base_layer.weight"])
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return base


def measure(only: str) -> list[Found]:
    """Make all, and ask for all."""
    import torch

    torch.set_num_threads(1)
    every = [row for row in rows() if only in row.name]
    found: list[Found] = []
    for kind in Base:
        wanted = [row for row in every if row.shape.base is kind]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as name:
            home = Path(name)
            if kind is Base.EXPERTS:
                found += loaded(home, wanted)
            elif kind is Base.WRAPPER:
                made = multimodal.build(home / "made")
                found += on_servers(home, made.base, None, wanted)
            else:
                base = build_llama(home)
                found += on_servers(home, base, by_peft(base, home, wanted), wanted)
    order = [row.name for row in every]
    return sorted(found, key=lambda one: order.index(one.name))


def section(result: Mapping[str, Any]) -> list[str]:
    """The part of the page on models, from what `benchmarks.record.keep` wrote."""
    found, versions = result["rows"], result["versions"]
    ours, stock = (Counter(_kind(row[side]) for row in found) for side in ("ours", "stock"))
    text = (
        f"{len(found)} adapters as {len({row['trainer'] for row in found})} programs write them, by their code:"
        f" {ours['served']} served within {LIMIT:g} times the noise floor of PEFT's answers, {ours['loaded']} with"
        f" experts loaded whole, {ours['refused']} refused by cause and remedy, {ours['silent']} silent."
        f" vLLM {vllm_of(result)} without our plugins: {stock['served']} served, {stock['loaded']} loaded,"
        f" {stock['refused']} refused (†),"
        f" **{stock['silent']} accepted that do something else or nothing** (‡)."
        f" `make bench-trainers`; PEFT {versions['peft']}, {result['cpu']},"
        f" {result['date']}, commit `{result['commit']}`."
    )
    of_trainer: dict[str, list[Mapping[str, Any]]] = {}
    for row in found:
        of_trainer.setdefault(f"{row['trainer']} {row['version']}".removesuffix(" ·"), []).append(row)
    lines = ["## Trainers", text, "", "| trainer | served as trained | loaded whole | refused |", "|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(_cells(rows_of))} |" for name, rows_of in of_trainer.items()]
    return [*lines, ""]


def _kind(verdict: str) -> str:
    kinds = {SERVED: "served", LOADED: "loaded", UNKNOWN: "accepted"}
    return "silent" if "**" in verdict else kinds.get(verdict, "refused")


def _cells(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is served, loaded and refused of one trainer's adapters, a refusal with its text."""
    cells: dict[str, dict[str, list[str]]] = {"served": {}, "loaded": {}, "refused": {}}
    for row in found:
        mark = {"refused": " †", "silent": " ‡"}.get(_kind(row["stock"]), "")
        kind = _kind(row["ours"])
        column = {"accepted": "served", "silent": "refused"}.get(kind, kind)
        verdict = "" if kind in ("served", "loaded") else row["ours"].removeprefix("refused: ")
        cells[column].setdefault(verdict, []).append(row["what"].replace("; ", ", ") + mark)
    return ["; ".join(_named(whats, verdict) for verdict, whats in column.items()) or "·" for column in cells.values()]


def _named(whats: Iterable[str], verdict: str) -> str:
    return "; ".join(whats) + (f": {_escaped(verdict)}" if verdict else "")


def _escaped(verdict: str) -> str:
    """What was found, without what the remedy repeats: the program, the part of the configuration."""
    verdict = re.sub(r"(,? (which|by tensor|in adapter_config\.json|of \d+ labels)\b).*", "", verdict)
    return verdict.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str]) -> int:
    found = measure(arguments[0] if arguments else "")
    plain = [dataclasses.asdict(one) for one in found]
    if not arguments:
        keep("trainers", plain)
    for one in found:
        print(one.is_right, one.name, "| stock:", one.stock, "| ours:", one.ours, one.times)
    wrong = [one.name for one in found if not one.is_right]
    print(f"{len(found)} adapters, {len(wrong)} otherwise than the table says: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
