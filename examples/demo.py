"""The main job, shown: a server is asked for names that it has never heard of, and answers as PEFT does.

Then one of the adapters gets a new version while requests for it run.

Exits with 1 if any answer differs from what it should be.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from examples.hot_swap import Swap, swap
from testbed.bed import CACHE, MAX_TOKENS, Bed, prepare
from testbed.client import Answer, complete, connect
from testbed.hub import Hub, local_hub
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.s3 import S3, s3_server
from testbed.server import Server, vllm_server

LOG = CACHE.parent / "demo-server.log"
STORE = CACHE.parent / "demo-store"
ADAPTERS = STORE / "adapters"
UNKNOWN = "nobody/has-this"
SWAPPED, SWAPPED_TO = "sql", "stable"
# Where an adapter is, and the name to request it by; the others are on the filesystem under their own names.
IN_S3 = {"chat": "chat"}
ON_HUB = {"wide": "acme/wide"}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    source: str
    kind: str
    cold: Answer
    warm: Answer
    expected: Sequence[int] | None

    @property
    def right(self) -> bool:
        if self.expected is None:
            return self.cold.status == self.warm.status == 404
        wanted = tuple(self.expected)
        return self.cold.status == self.warm.status == 200 and self.cold.token_ids == self.warm.token_ids == wanted


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    with console.status("preparing") as status, ExitStack() as running:
        bed = prepare(lambda text: _say(console, text))
        _say(console, "starting an S3 server (moto) and a local Hub, and putting adapters there")
        env = _publish(bed, running.enter_context(s3_server()), running.enter_context(local_hub()))
        _say(console, f"starting vllm serve with {env['VLLM_PLUGINS'].replace(',', ', ')}")
        server = running.enter_context(
            _server(bed, env, lambda seconds: status.update(f"starting vllm serve, {seconds:.0f} s (about 30)"))
        )
        status.update("asking")
        rows = ask(server, bed)
        status.update("swapping")
        swapped = swap(server, bed, ADAPTERS, SWAPPED, SWAPPED_TO)
    console.print(table(rows))
    console.print(_summary(swapped))
    wrong = [row.name for row in rows if not row.right] + ([] if swapped.right else [f"the swap of {SWAPPED}"])
    if wrong:
        console.print(f"[red]Wrong: {', '.join(wrong)}. The server's log: {LOG.relative_to(CACHE.parent.parent)}")
        return 1
    served = sum(row.kind != "base" and row.expected is not None for row in rows)
    console.print(f"All {served} adapters answered, token for token, as PEFT does; the servers have been stopped.")
    return 0


def _publish(bed: Bed, s3: S3, hub: Hub) -> dict[str, str]:
    """Put each adapter where it is to be found; returns the settings of a server that looks there."""
    shutil.rmtree(STORE, ignore_errors=True)  # so that the first request of every run is a cold one
    root = ADAPTERS
    for spec in DEMO_ADAPTERS:
        adapter = bed.adapters / spec.name
        if spec.name in IN_S3:
            s3.bucket("adapters").put_directory(f"loras/{IN_S3[spec.name]}", adapter)
        elif spec.name in ON_HUB:
            hub.commit(ON_HUB[spec.name], {file.name: file.read_bytes() for file in adapter.iterdir()})
        else:
            shutil.copytree(adapter, root / spec.name)
    return {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": (
            "lora_filesystem_resolver,lora_s3_resolver,lora_hf_hub_resolver,lora_lru_manager,lora_kernels,lora_admin"
        ),
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(root),
        "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}",
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": "acme/*",
        "LORA_PLUGINS_STORE_DIR": str(STORE / "store"),
        **s3.env(),
        **hub.env(STORE / "hub-home"),
    }


def ask(server: Server, bed: Bed) -> list[Row]:
    """Ask for everything twice: the first time the server has to find it."""
    client = connect(server)
    base = str(bed.base)
    wanted = [(base, "-", "base", bed.answers[None])]
    for spec in DEMO_ADAPTERS:
        kind = f"rank {spec.rank}" + (", rsLoRA" if spec.extra.get("use_rslora") else "")
        source = "S3" if spec.name in IN_S3 else "Hub" if spec.name in ON_HUB else "filesystem"
        name = ON_HUB.get(spec.name) or IN_S3.get(spec.name) or spec.name
        wanted.append((name, source, kind, bed.answers[spec.name]))
    wanted.append((UNKNOWN, "-", "does not exist", None))
    rows = []
    for name, source, kind, expected in wanted:
        cold, warm = (complete(client, name, PROMPT, MAX_TOKENS) for _ in range(2))
        rows.append(Row("(base model)" if name == base else name, source, kind, cold, warm, expected))
    return rows


def table(rows: Sequence[Row]) -> Table:
    result = Table(title=f"{MAX_TOKENS} greedy tokens each, vllm serve on this machine")
    for heading in ("name", "kind", "source", "status"):
        result.add_column(heading)
    result.add_column("first token, cold", justify="right")
    result.add_column("warm", justify="right")
    result.add_column("same as PEFT?")
    for row in rows:
        same = "NO" if not row.right else "-" if row.expected is None else "yes"
        result.add_row(
            row.name, row.kind, row.source, str(row.cold.status), _milliseconds(row.cold), _milliseconds(row.warm), same
        )
    return result


def _summary(swapped: Swap) -> str:
    seen = ", ".join(f"{swapped.answers[kind]} {kind}" for kind in ("old", "new", "neither", "refused"))
    return (
        f"A new version of '{SWAPPED}' was published while clients asked for it. POST /v1/loras/{SWAPPED}/refresh: "
        f"{swapped.message.rstrip('.')} ({swapped.swap_s * 1e3:.0f} ms). Answers: {seen}."
    )


def _milliseconds(answer: Answer) -> str:
    return f"{answer.first_token_s * 1e3:.0f} ms" if answer.status == 200 else "-"


def _say(console: Console, text: str) -> None:
    console.print(f"demo: {text}")


def _server(bed: Bed, env: Mapping[str, str], progress: Callable[[float], None]) -> AbstractContextManager[Server]:
    return vllm_server(
        bed.base,
        LOG,
        arguments=("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "8"),
        env=env,
        progress=progress,
    )


if __name__ == "__main__":
    sys.exit(main())
