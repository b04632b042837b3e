"""The main job, shown: a server is asked for names that it has never heard of, and answers as PEFT does.

Then an adapter is trained and asked for while the server runs; another gets a new version while clients ask for it.

Exits with 1 if any answer differs from what it should be.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples.demo_models import DemoModel, choose
from examples.hot_swap import Swap, publish, swap
from examples.training import with_peft
from testbed.bed import CACHE
from testbed.client import Answer, connect
from testbed.hub import Hub, local_hub
from testbed.s3 import S3, s3_server
from testbed.server import Server, vllm_server

LOG = CACHE.parent / "demo-server.log"
STORE = CACHE.parent / "demo-store"
ADAPTERS = STORE / "adapters"
BASE, UNKNOWN = "(base model)", "nobody/has-this"


@dataclass(frozen=True)
class Row:
    """One line of the table: a name, asked for twice, and the adapter that should have answered, if one is there."""

    name: str
    source: str
    kind: str
    adapter: Path | None
    cold: Answer
    warm: Answer

    @property
    def is_absent(self) -> bool:
        return self.name == UNKNOWN

    def is_right(self, model: DemoModel) -> bool:
        if self.is_absent:
            return self.cold.status == self.warm.status == 404
        return all(got.status == 200 and model.is_right(self.adapter, got) for got in (self.cold, self.warm))


class Demo:
    """A running server, and what is shown of it."""

    def __init__(self, console: Console, model: DemoModel, server: Server) -> None:
        self.console = console
        self.model = model
        self._client = connect(server)

    def ask(self, name: str, source: str, kind: str, adapter: Path | None) -> Row:
        """Ask for a name twice: the first time the server has to find its adapter. The answer is shown as it comes."""
        served = self.model.base.name if name == BASE else name
        writer = Writer(self.console, name)
        cold = self.model.ask(self._client, served, writer.show)
        writer.end(f"{cold.status}, {cold.error}" if cold.error else "")
        with self.console.status("asking again"):
            warm = self.model.ask(self._client, served, lambda text: None)
        return Row(name, source, kind, adapter, cold, warm)

    def ask_all(self) -> list[Row]:
        rows = [self.ask(BASE, "-", "base", None)]
        for name, kind in self.model.kinds.items():
            source = "S3" if name == self.model.in_s3 else "Hub" if name == self.model.on_hub else "filesystem"
            rows.append(self.ask(_requested(self.model, name), source, kind, self.model.root / name))
        return [*rows, self.ask(UNKNOWN, "-", "does not exist", None)]

    def train_and_ask(self) -> list[Row]:
        """Train an adapter while the server runs, put it where the server looks, and ask for its name."""
        recipe = self.model.trained
        if recipe is None:
            return []
        made = STORE / "trained" / recipe.name
        started = time.monotonic()
        with self.console.status(f"training '{recipe.name}'") as status:
            losses = with_peft.train(
                recipe, self.model.base, made,
                lambda step, loss: status.update(f"training '{recipe.name}': step {step}, loss {loss:.2f}"),
            )  # fmt: skip
        publish(made, ADAPTERS / recipe.name)
        _say(
            self.console,
            f"trained '{recipe.name}' on {len(recipe.pairs())} answers with PEFT, {len(losses)} steps in "
            f"{time.monotonic() - started:.0f} s, and asking for it",
        )
        return [self.ask(recipe.name, "filesystem", recipe.kind, made)]


class Writer:
    """Writes an answer behind its name, word by word as it comes, in lines that begin below each other."""

    MARGIN = 17

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._column = self.MARGIN
        self._begun = ""  # a word that the next piece may continue
        console.print(f"[bold]{name:>{self.MARGIN - 2}}[/]  ", end="")

    def show(self, text: str) -> None:
        *words, self._begun = re.split(r"(?<=\S)(?=\s)", self._begun + text)
        for word in words:
            self._write(word)

    def end(self, text: str) -> None:
        self._write(self._begun + text)
        self._console.out()

    def _write(self, word: str) -> None:
        breaks = "\n" in word or self._column + len(word) > self._console.width
        written = word.strip() if breaks else word
        self._console.out("\n" + " " * self.MARGIN if breaks else "", written, sep="", end="", highlight=False)
        self._column = len(written) + (self.MARGIN if breaks else self._column)


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    with ExitStack() as running:
        with console.status("preparing") as status:
            model = choose(lambda text: _say(console, text))
            _say(console, "starting an S3 server (moto) and a local Hub, and putting adapters there")
            env = _publish(model, running.enter_context(s3_server()), running.enter_context(local_hub()))
            _say(console, f"starting vllm serve with {env['VLLM_PLUGINS'].replace(',', ', ')}")
            server = running.enter_context(
                _server(model, env, lambda seconds: status.update(f"starting vllm serve, {seconds:.0f} s (about 30)"))
            )
        demo = Demo(console, model, server)
        _say(console, f"asking the base model and names that the server has never heard of: “{model.asked}”")
        rows = [*demo.ask_all(), *demo.train_and_ask()]
        with console.status(f"swapping '{model.swapped[0]}' while clients ask for it, and comparing with PEFT"):
            swapped = swap(server, model, ADAPTERS)
            right = {row.name: row.is_right(model) for row in rows}
    console.print(table(rows, right))
    console.print(_summary(model.swapped[0], swapped))
    wrong = [name for name, is_right in right.items() if not is_right] + ([] if swapped.right else ["the swap"])
    if wrong:
        console.print(f"[red]Wrong: {', '.join(wrong)}. The server's log: {LOG.relative_to(CACHE.parent.parent)}")
        return 1
    served = sum(row.source != "-" for row in rows)
    console.print(f"All {served} adapters answered, token for token, as PEFT does; the servers have been stopped.")
    return 0


def _publish(model: DemoModel, s3: S3, hub: Hub) -> dict[str, str]:
    """Put each adapter where it is to be found; returns the settings of a server that looks there."""
    shutil.rmtree(STORE, ignore_errors=True)  # so that the first request of every run is a cold one
    for name in model.kinds:
        adapter = model.root / name
        if name == model.in_s3:
            s3.bucket("adapters").put_directory(f"loras/{_requested(model, name)}", adapter)
        elif name == model.on_hub:
            hub.commit(_requested(model, name), {file.name: file.read_bytes() for file in adapter.iterdir()})
        else:
            shutil.copytree(adapter, ADAPTERS / name)
    return {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": "lora_plugins",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(ADAPTERS),
        "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}",
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": "acme/*",
        "LORA_PLUGINS_STORE_DIR": str(STORE / "store"),
        **s3.env(),
        **hub.env(STORE / "hub-home"),
    }


def _requested(model: DemoModel, name: str) -> str:
    return f"acme/{name}" if name == model.on_hub else name


def table(rows: Sequence[Row], right: Mapping[str, bool]) -> Table:
    result = Table(title="what vllm serve answered, and the time to its first token")
    for heading in ("name", "kind", "source", "status"):
        result.add_column(heading)
    result.add_column("cold", justify="right")
    result.add_column("warm", justify="right")
    result.add_column("same as PEFT?")
    for row in rows:
        same = "NO" if not right[row.name] else "-" if row.is_absent else "yes"
        result.add_row(
            row.name, row.kind, row.source, str(row.cold.status), _milliseconds(row.cold), _milliseconds(row.warm), same
        )
    return result


def _summary(name: str, swapped: Swap) -> str:
    seen = ", ".join(f"{swapped.answers[kind]} {kind}" for kind in ("old", "new", "neither", "refused"))
    return (
        f"A new version of '{name}' was published while clients asked for it. POST /v1/loras/{name}/refresh: "
        f"{swapped.message.rstrip('.')} ({swapped.swap_s * 1e3:.0f} ms). Answers: {seen}."
    )


def _milliseconds(answer: Answer) -> str:
    return f"{answer.first_token_s * 1e3:.0f} ms" if answer.status == 200 else "-"


def _say(console: Console, text: str) -> None:
    console.print(f"demo: {text}")


def _server(
    model: DemoModel, env: Mapping[str, str], progress: Callable[[float], None]
) -> AbstractContextManager[Server]:
    return vllm_server(
        model.base,
        LOG,
        arguments=(
            *("--served-model-name", model.base.name),
            *("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "8"),
        ),
        env=env,
        progress=progress,
    )


if __name__ == "__main__":
    sys.exit(main())
