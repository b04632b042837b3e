"""What is compared: vLLM's manager and ours, with vLLM's CPU kernels or the rank-exact ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.server import Server, vllm_server

ARMS: Mapping[str, tuple[str, ...]] = {
    "vllm": (),
    "ours": ("lora_lru_manager",),
    "vllm+kernels": ("lora_kernels",),
    "ours+kernels": ("lora_lru_manager", "lora_kernels"),
}
NAMES = {
    "vllm": "vLLM",
    "ours": "ours, vLLM's kernels",
    "vllm+kernels": "vLLM's manager, our kernels",
    "ours+kernels": "ours",
}


@dataclass(frozen=True)
class Arm:
    """One running server of an arm."""

    name: str
    server: Server
    port: int


def environment(arm: str) -> dict[str, str]:
    return {
        "VLLM_PLUGINS": ",".join(ARMS[arm]),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


@contextlib.contextmanager
def servers(
    arms: Sequence[str],
    base: Path,
    home: Path,
    arguments: Sequence[str],
    environment_of: Callable[[str], Mapping[str, str]] = environment,
) -> Iterator[list[Arm]]:
    """All arms' servers at once; those that are not asked wait on a socket. So measurements can alternate quickly."""
    with contextlib.ExitStack() as stack:
        running = []
        for arm in arms:
            server = stack.enter_context(
                vllm_server(
                    base,
                    home / f"{arm}.log",
                    arguments=("--enable-lora", "--max-model-len", "1024", "--disable-uvicorn-access-log", *arguments),
                    env=environment_of(arm),
                )
            )
            # On a machine that others use too, a niceness counts within a session only.
            with contextlib.suppress(OSError):
                Path(f"/proc/{server.process.pid}/autogroup").write_text(str(os.nice(0)))
            running.append(Arm(arm, server, int(server.url.rpartition(":")[2])))
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})  # vLLM binds its compute threads to the other ones
        stack.callback(os.sched_setaffinity, 0, cores)  # which the next servers inherit
        yield running
