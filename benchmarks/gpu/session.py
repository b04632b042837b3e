"""What each program has: its device, our operators with their tuning table, its time, compilers, and its result.

Compilers are many processes at once, so that the device does not wait for them. A process calls the operators on empty
CPU tensors with Triton's `run` turned into its own `warmup`, for a device of which it only knows the architecture. What
it compiles lies in Triton's cache (TRITON_CACHE_DIR), under the key by which the launch on the device finds it. Nothing
is launched, so this runs where there is no GPU, and a rehearsal compiles for sm_90.
"""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self
from unittest import mock

from benchmarks.gpu.device import Gpu
from benchmarks.record import circumstances

Job = tuple[Callable[..., None], tuple[Any, ...]]  # a function at the top of a module, and what it is called with

SPARE_CORES = 2
EVERY_S = 1.0  # how often rows are written; a program that is killed loses no more than this


class Compilers:
    """Processes that compile; use as a context.

    Attributes:
        compiled: kernels that no cache had.
    """

    def __init__(self, capability: int, processes: int | None = None) -> None:
        count = processes or max(1, (os.cpu_count() or 1) - SPARE_CORES)
        self._pool = ProcessPoolExecutor(
            count, mp_context=get_context("spawn"), initializer=_become_compiler, initargs=(capability,)
        )
        self.compiled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def compile(self, jobs: Iterable[Job], until: float) -> list[str]:
        """Do these jobs; returns what went wrong, one text for each that failed. Ends at `until` with what is done."""
        futures: dict[Future[int], Job] = {self._pool.submit(_compile, job): job for job in jobs}
        done, late = wait(futures, timeout=max(0.0, until - time.monotonic()))
        for future in late:
            future.cancel()
        wrong = [f"{len(late)} of {len(futures)} calls were not compiled in time"] if late else []
        for future in done:
            try:
                self.compiled += future.result()
            except Exception as error:
                wrong.append(f"{futures[future][1]}: {type(error).__name__}: {str(error)[:500]}")
        return wrong


def _become_compiler(capability: int) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    torch.set_num_threads(1)
    # As much of a driver as compiling needs.
    driver.set_active(
        mock.Mock(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
        )
    )


def _compile(job: Job) -> int:
    from triton.runtime.jit import JITFunction

    function, arguments = job
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with mock.patch.object(JITFunction, "run", compile_only), noted() as compiled:
        function(*arguments)
    return len(compiled)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Yields the names of kernels that are compiled meanwhile, in this process: those that no cache had."""
    import triton

    names: list[str] = []

    def listen(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            names.append(getattr(src, "name", "?"))

    before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, listen
    try:
        yield names
    finally:
        triton.knobs.compilation.listener = before


class Result:
    """One JSON file: what is known at the start, then rows as they come; whole and readable at every moment.

    It says whether it is `complete`, and, where no GPU computed it, that it is a rehearsal.

    Attributes:
        rows: what was added. content: what else the file holds.
    """

    def __init__(self, folder: Path, name: str, facts: Mapping[str, object], *, rehearsal: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{'rehearsal_' if rehearsal else ''}{name}.json"
        self.rows: list[dict[str, object]] = []
        self.content: dict[str, object] = {"rehearsal: not measured": True} if rehearsal else {}
        self.content |= {"complete": False, **circumstances(), **facts}
        self._written_at = 0.0
        self._write()

    def add(self, row: Mapping[str, object]) -> None:
        """Keep a row, print it, and write the file where the last time is long enough ago."""
        self.rows.append(dict(row))
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        if time.monotonic() - self._written_at > EVERY_S:
            self._write()

    def note(self, **facts: object) -> None:
        """Keep facts about the whole, and write the file."""
        self.content |= facts
        self._write()

    def finish(self, **facts: object) -> None:
        """Write the file for the last time."""
        self.note(**facts, complete=True)
        print(self.path, flush=True)

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({**self.content, "rows": self.rows}, indent=1) + "\n")
        part.replace(self.path)
        self._written_at = time.monotonic()


class Session:
    """One program's.

    Attributes:
        table: the tuning table. made: our `Operators` with it, in use in this process.
    """

    def __init__(self, gpu: Gpu, options: Namespace) -> None:
        from lora_plugins.kernels.triton_ops import operators

        self.began = time.monotonic()
        self.gpu, self.out, self.seconds = gpu, options.out, options.seconds
        self.table = gpu.table(options.table)
        operators.use(made := operators.Operators(self.table))
        self.made = made

    @property
    def is_over(self) -> bool:
        """Whether nothing new is to be begun."""
        return time.monotonic() > self.began + self.seconds

    def result(self, name: str, **facts: object) -> Result:
        """Begin the file of results."""
        table = Path(self.table.origin).name
        return Result(self.out, name, {**self.gpu.facts(), "table": table, **facts}, rehearsal=self.gpu.rehearsal)

    def compile_ahead(self, jobs: Sequence[Job], share: float) -> dict[str, object]:
        """Compile what is to be launched, within a share of the time that is left; returns facts about it."""
        began = time.monotonic()
        until = began + share * (self.began + self.seconds - began)
        problems = self._compilers.compile(jobs, until)
        took = round(time.monotonic() - began, 1)
        return {"compile_s": took, "compiled": self._compilers.compiled, "not_compiled": problems}

    @cached_property
    def _compilers(self) -> Compilers:
        return Compilers(self.gpu.capability)  # once: its processes take seconds to begin
