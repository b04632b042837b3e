"""A reader who follows a page: does every block of it in order, as it stands but for what a table says."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from testbed.pages import Block, blocks
from testbed.server import Server, end, wait_until_healthy

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TIMEOUT_S = 900


class Do(Enum):
    """What a reader does with a block."""

    RUN = "in a shell"
    SERVE = "in a shell of its own; goes on when the server is healthy"
    WRITE = "into a file"
    LEAVE_OUT = "is not done here, and why"


def index_variables() -> dict[str, str]:
    """This machine's variables that lead pip to its index."""
    return {name: text for name, text in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}


@dataclass(frozen=True)
class Step:
    """One block of the page: how it begins, what is done with it, the file or the reason, commands of before, the exit
    code that the page shows or explains, and the digest of a block of several lines that is left out."""

    first: str
    do: Do = Do.RUN
    note: str = ""
    before: str = ""
    exits: int = 0
    digest: str = ""

    def wrong(self, block: Block) -> str:
        """Where another text than the one that the reason is about is left out."""
        digest = hashlib.sha256(block.text.encode()).hexdigest()[:8] if block.text.strip() != block.first else ""
        changed = self.do is Do.LEAVE_OUT and digest != self.digest
        return f"{block.first}: changed; if the reason still holds, digest={digest!r}" if changed else ""


def left_out(first: str, why: str, digest: str = "") -> Step:
    return Step(first, Do.LEAVE_OUT, why, digest=digest)


@dataclass(frozen=True)
class Walk:
    """A page, its blocks in order, and all that is read otherwise than it stands: text → (replacement, why).

    Replacements may name `{values}` that a test knows only when it runs.
    """

    page: str
    steps: Sequence[Step]
    substitutions: Mapping[str, tuple[str, str]]

    def blocks(self) -> list[Block]:
        return blocks((ROOT / self.page).read_text())

    def wrong(self) -> list[str]:
        """Where the page has other blocks than the steps say, or lacks what is substituted."""
        found = [block.first for block in self.blocks()]
        listed = [step.first for step in self.steps]
        wrong = [f"{self.page}: a block that no step names: {first}" for first in found if first not in listed]
        wrong += [f"{self.page}: no such block: {first}" for first in listed if first not in found]
        if not wrong and found != listed:
            wrong.append(f"{self.page}: its blocks come in another order: {found}")
        pairs = list(zip(self.blocks(), self.steps, strict=False))
        wrong += [f"{self.page}: {said}" for block, step in pairs if (said := step.wrong(block))]
        done = "".join(block.commands() for block, step in pairs if step.do is not Do.LEAVE_OUT)
        return wrong + [
            f"{self.page}: nothing to substitute: {text}" for text in self.substitutions if text not in done
        ]


@dataclass
class Reader:
    """A shell that remembers its variables, and the servers that were started beside it."""

    walk: Walk
    folder: Path
    env: Mapping[str, str]
    values: Mapping[str, str]
    url: str
    printed: dict[str, str] = field(default_factory=dict)
    servers: list[Server] = field(default_factory=list)
    served: Callable[[str], None] = lambda first: None  # after each start, with the first line of its block

    def read(self) -> None:
        """Do every step; `printed` has the output of each block that ran, by the block's first line.

        Behind a console's output stand its errors, which the page shows too.
        """
        assert self.walk.wrong() == []
        for step, block in zip(self.walk.steps, self.walk.blocks(), strict=True):
            if step.before:
                self.run(replace(block, text=f"{step.before}\n", language=""))
            if step.do is Do.WRITE:
                file = self.folder / step.note
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(self._as_read(block.text))
            elif step.do is Do.SERVE:
                self.serve(block)
                self.served(step.first)
            elif step.do is Do.RUN:
                self.printed[step.first] = self.run(block, exits=step.exits)

    def run(self, block: Block, *, exits: int = 0) -> str:
        """What a block's commands print; all have to succeed, but for the last where another exit code is given."""
        with subprocess.Popen(
            ["bash", "-c", self._script(block)],
            cwd=self.folder, env=self._env(), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as shell:  # fmt: skip
            try:
                out, err = shell.communicate(timeout=BLOCK_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                shell.kill()
                raise
        where = f"{self.walk.page}:{block.line}"
        assert shell.returncode == exits, f"{where} ended with {shell.returncode}:\n{block.text}\n{out}{err}"
        return f"{out}{err}" if block.language == "console" else out

    def serve(self, block: Block) -> None:
        """Start the block's server; one that an earlier block has started ends before."""
        for server in self.servers:
            end(server.process)
        log_file = self.folder / f"server-{len(self.servers)}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", self._script(block, keeps=False)],
                cwd=self.folder, env=self._env(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.servers.append(Server(self.url, process, log_file))
        wait_until_healthy(self.servers[-1])

    def _as_read(self, text: str) -> str:
        for written, (read, _) in self.walk.substitutions.items():
            text = text.replace(written, read.format_map(self.values))
        return text

    def _script(self, block: Block, *, keeps: bool = True) -> str:
        # A server that ends must not bring back the variables of the time when it began: hence `keeps`.
        text = self._as_read(block.commands())
        if block.language == "python":
            text = f"python - <<'END-OF-BLOCK'\n{text}END-OF-BLOCK\n"
        variables = self.folder / ".variables"
        variables.touch()
        kept = r"declare -p | grep -Ev '^declare -\w*r|^declare -\S+ (BASH|FUNCNAME|GROUPS|DIRSTACK|SHELLOPTS|_=)'"
        return f"set -eo pipefail\n. {variables}\n{text}\n" + (f"{kept} > {variables}\n" if keeps else "")

    def _env(self) -> dict[str, str]:
        inherited = ("PATH", "PYTHONPATH", "LANG", "HOME")
        return {**{name: os.environ[name] for name in inherited if name in os.environ}, **self.env}


@contextmanager
def reading(
    walk: Walk,
    folder: Path,
    *,
    env: Mapping[str, str],
    values: Mapping[str, str],
    url: str,
    served: Callable[[str], None] = lambda first: None,
) -> Iterator[Reader]:
    """Someone who has done every step; the servers end with the block."""
    reader = Reader(walk, folder, env, values, url, served=served)
    try:
        reader.read()
        yield reader
    finally:
        for server in reader.servers:
            end(server.process)
