"""The main job, shown: a server is asked for names that it has never heard of, and answers as PEFT does.

Exits with 1 if any answer differs from what it should be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from testbed.bed import CACHE, MAX_TOKENS, Bed, prepare
from testbed.client import Answer, complete, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import Server, vllm_server

LOG = CACHE.parent / "demo-server.log"
UNKNOWN = "nobody/has-this"


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
    with console.status("preparing") as status:
        bed = prepare(lambda text: _say(console, text))
        _say(console, "starting vllm serve with VLLM_PLUGINS=lora_filesystem_resolver")
        with _server(bed, lambda seconds: status.update(f"starting vllm serve, {seconds:.0f} s (about 30)")) as server:
            status.update("asking")
            rows = ask(server, bed)
    console.print(table(rows))
    wrong = [row.name for row in rows if not row.right]
    if wrong:
        console.print(f"[red]Wrong: {', '.join(wrong)}. The server's log: {LOG.relative_to(CACHE.parent.parent)}")
        return 1
    served = sum(row.kind != "base" and row.expected is not None for row in rows)
    console.print(f"All {served} adapters answered, token for token, as PEFT does; the server has been stopped.")
    return 0


def ask(server: Server, bed: Bed) -> list[Row]:
    """Ask for everything twice: the first time the server has to find it."""
    client = connect(server)
    base = str(bed.base)
    wanted = [(base, "-", "base", bed.answers[None])]
    for spec in DEMO_ADAPTERS:
        kind = f"rank {spec.rank}" + (", rsLoRA" if spec.extra.get("use_rslora") else "")
        wanted.append((spec.name, "filesystem", kind, bed.answers[spec.name]))
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


def _milliseconds(answer: Answer) -> str:
    return f"{answer.first_token_s * 1e3:.0f} ms" if answer.status == 200 else "-"


def _say(console: Console, text: str) -> None:
    console.print(f"demo: {text}")


def _server(bed: Bed, progress: Callable[[float], None]) -> AbstractContextManager[Server]:
    return vllm_server(
        bed.base,
        Path(LOG),
        arguments=("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "8"),
        env={
            "VLLM_PLUGINS": "lora_filesystem_resolver",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(bed.adapters),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        },
        progress=progress,
    )


if __name__ == "__main__":
    sys.exit(main())
