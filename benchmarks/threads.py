"""Adapters of threads in which they were accepted and did nothing: what stock vLLM makes of each, and what we do.

Each is asked for twice by name: on a real `vllm serve` without our plugins (VLLM_PLUGINS is empty, the adapter is
loaded by `/v1/load_lora_adapter`), and on one with them. Whether it has an effect, and the right one, is seen in
logarithms of probabilities. Result in benchmarks/results/threads.json; `python -m benchmarks.models --page` prints the
table.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.record import RESULTS, keep
from lora_plugins.cli.compare import CompletionServer
from lora_plugins.errors import LoRAPluginsError
from testbed import multimodal
from testbed.architectures import BY_NAME
from testbed.model_builder import PROMPT as IDS
from testbed.model_builder import build as build_model
from testbed.models import ATTENTION, AdapterSpec, build_adapter, build_base, write_tokenizer
from testbed.mutants import Adapter, read, write
from testbed.server import vllm_server

KEPT = RESULTS / "threads.json"
NAME, RIGHT = "adapter", "as-trained"
EQUAL = 1e-4  # of logarithms of probabilities, in float32


@dataclasses.dataclass(frozen=True)
class Thread:
    """An adapter, what was done to it, and the server that it is asked of.

    Attributes:
        links: the threads. what: the adapter, in words. make: writes the base model, the adapter as it is in the thread
            under `NAME`, and one of the same tensors that every engine takes under `RIGHT`, where there is one.
        arguments: of `vllm serve`.
    """

    links: tuple[str, ...]
    what: str
    make: Callable[[Path], tuple[Path, Path]]
    arguments: tuple[str, ...] = ()


def _llama(home: Path, *targets: str) -> tuple[Path, Path]:
    base = build_base(home / "base", hidden=128, layers=2)
    build_adapter(base, home / "adapters", AdapterSpec(RIGHT, 8, targets))
    return base, home / "adapters"


def _renamed(adapters: Path, change: Callable[[str], str]) -> None:
    """The adapter with other names; without the base model's own head, which PEFT saves beside a trained one."""
    adapter = read(adapters / RIGHT)
    tensors = {change(name): one for name, one in adapter.tensors.items() if ".base_layer." not in name}
    write(Adapter(tensors, adapter.config), adapters / NAME)


def prefix(home: Path) -> tuple[Path, Path]:
    base, adapters = _llama(home, *ATTENTION)
    _renamed(adapters, lambda name: name.replace("model.layers.", "model.language_model.layers."))
    return base, adapters


def left_out(home: Path) -> tuple[Path, Path]:
    base, adapters = _llama(home, "down_proj")
    shutil.move(adapters / RIGHT, adapters / NAME)
    return base, adapters


def head_below_model(home: Path) -> tuple[Path, Path]:
    base, adapters = _llama(home, *ATTENTION, "lm_head")
    _renamed(adapters, lambda name: name.replace(".lm_head.", ".model.lm_head."))
    return base, adapters


def raw_head(home: Path) -> tuple[Path, Path]:
    base, adapters = _llama(home, *ATTENTION, "lm_head")
    _renamed(adapters, lambda name: name.replace(".lm_head.", ".model.unembed_tokens."))
    return base, adapters


def text_on_wrapper(home: Path) -> tuple[Path, Path]:
    made = multimodal.build(home)
    shutil.move(made.adapters / "text", made.adapters / RIGHT)
    _renamed(made.adapters, lambda name: name.replace("model.text_model.layers.", "model.layers."))
    return made.base, made.adapters


def latent_attention(home: Path) -> tuple[Path, Path]:
    architecture = BY_NAME["DeepseekV2ForCausalLM"]
    build_model(architecture, home / "base", home / "adapters")
    write_tokenizer(home / "base", 256)
    shutil.move(home / "adapters" / "attention", home / "adapters" / NAME)
    return home / "base", home / "adapters"


VLLM, TINKER = "vllm-project/vllm#", "thinking-machines-lab/tinker-cookbook#"
THREADS = (
    Thread((f"{VLLM}34186",), "keys under another prefix (`model.language_model.layers`)", prefix),
    Thread(
        (f"{VLLM}48019", f"{VLLM}34591", f"{VLLM}41754"),
        "a text model's keys (`model.layers`) on its multimodal wrapper; here Idefics3",
        text_on_wrapper,
    ),
    Thread(
        (f"{VLLM}48974",),
        "`kv_b_proj` of multi-head latent attention; here DeepSeek-V2",
        latent_attention,
        ("--attention-backend", "CPU_MLA"),  # on processors with AMX vLLM 0.32 takes a backend that has no float32
    ),
    Thread(
        (f"{VLLM}55193",),
        "`down_proj` alone, on a server with `--lora-target-modules qkv_proj`",
        left_out,
        ("--lora-target-modules", "qkv_proj"),
    ),
    Thread((f"{TINKER}928",), "a head below the model (`model.lm_head`)", head_below_model),
    Thread((f"{TINKER}593", f"{TINKER}193"), "Tinker's raw head (`model.unembed_tokens`)", raw_head),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A thread's links and adapter, and what each server makes of it."""

    links: tuple[str, ...]
    what: str
    stock: str
    ours: str


def examined(thread: Thread, home: Path) -> Row:
    """Both servers' verdicts on one adapter."""
    base, adapters = thread.make(home)
    said = []
    for plugins in ("", "lora_filesystem_resolver,lora_lru_manager,lora_kernels"):
        env = {
            "VLLM_PLUGINS": plugins,
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(adapters),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "LORA_PLUGINS_STORE_DIR": str(home / "store"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        arguments = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--num-gpu-blocks-override", "160")
        log = home / f"server-{len(said)}.log"
        small = ("--max-model-len", "128", *arguments, *thread.arguments)
        with vllm_server(base, log, arguments=small, env=env, is_forking=True) as running:
            said.append(_verdict(running.url, adapters, is_stock=not plugins))
    return Row(thread.links, thread.what, *said)


def _verdict(url: str, adapters: Path, *, is_stock: bool) -> str:
    server = CompletionServer(url, 120.0)
    plain = server.logprobs(server.base_model(), IDS, by_token=True)
    found: dict[str, Sequence[float]] = {}
    for name in (RIGHT, NAME):
        if not (adapters / name).is_dir():
            continue
        if is_stock:
            answer = httpx.post(
                f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapters / name)}, timeout=120
            )
            if answer.is_error:
                return f"refused: {shortened(answer.text)}"
        try:
            found[name] = server.logprobs(name, IDS, by_token=True)
        except LoRAPluginsError as error:
            return f"refused: {shortened(error.found)}"
    if far(found[NAME], plain) <= EQUAL:
        return "**accepted, and answers as the base model**"
    if RIGHT not in found:
        return "served"
    return "served as trained" if far(found[NAME], found[RIGHT]) <= EQUAL else "**accepted, and served in part**"


def far(some: Iterable[float], others: Iterable[float]) -> float:
    """The largest difference of two rows of numbers."""
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def shortened(text: str) -> str:
    """The finding, without remedies and temporary folders."""
    text = without_temporary_folders(text)
    found = re.search(r"(\[L\d{3}\]).*? found (.*?)(?: \(base model|; expected|, such as)", text, re.DOTALL)
    if found:
        return f"{found[1]} {found[2]}"
    message = re.search(r"[\"']message[\"']: *[\"'](.*?)[\"'],", text, re.DOTALL)
    words = " ".join((message[1] if message else text).split())
    cause = words.rpartition("<path>, ")[2]  # behind vLLM's own account of the call
    return cause[:100] + ("…" if len(cause) > 100 else "")


def without_temporary_folders(text: str) -> str:
    """The text with the bare name of each file that lies in a temporary folder."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[^\s,;:'\"]*/", "", text)


def section(result: Mapping[str, Any]) -> list[str]:
    """The part of the page on models, from what `benchmarks.record.keep` wrote."""
    versions = result["versions"]
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    text = (
        "Threads in which an adapter was accepted and did nothing: a small adapter of the form of each, asked for by"
        f" name on `vllm serve` {vllm} without our plugins, and with them (`make bench-mutants`; {result['date']},"
        f" commit `{result['commit']}`)."
    )
    lines = [
        "## Threads",
        text,
        "",
        "| thread | adapter | stock vLLM | with lora-plugins |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        links = ", ".join(f"[{link}]({_url(link)})" for link in row["links"])
        lines.append(f"| {links} | {row['what']} | {row['stock']} | {row['ours']} |")
    return [*lines, ""]


def _url(link: str) -> str:
    repository, _, number = link.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def main() -> int:
    rows = []
    for thread in THREADS:
        with tempfile.TemporaryDirectory() as home:
            rows.append(dataclasses.asdict(examined(thread, Path(home))))
        print(rows[-1], file=sys.stderr)
    keep("threads", rows)
    print("\n".join(section(json.loads(KEPT.read_text()))))
    return int(any("**" in row["ours"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
