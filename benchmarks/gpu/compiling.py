"""Compile what calls would launch, in many processes at once, so that the device does not wait for compilers.

A process calls the operators on empty CPU tensors with Triton's `run` turned into its own `warmup`, for a device of
which it only knows the architecture. What it compiles lies in Triton's cache (TRITON_CACHE_DIR), under the key by which
the launch on the device finds it. Nothing is launched, so this runs where there is no GPU, and a rehearsal compiles for
sm_90.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, Self
from unittest import mock

Job = tuple[Callable[..., None], tuple[Any, ...]]  # a function at the top of a module, and what it is called with

SPARE_CORES = 2


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
