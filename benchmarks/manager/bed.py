"""The base model and the adapters, made once and kept in `.cache/`, and the servers that are compared on them.

Compared are vLLM's manager and ours, both with our CPU kernels.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.adapters import write_random_adapter
from benchmarks.callers import port_of
from testbed.models import build_base
from testbed.server import Server, vllm_server

HIDDEN, LAYERS = 1024, 36  # 340 M parameters, 1.4 GB in float32
RANKS = {40: 16, 150: 64, 600: 256}  # by the adapter's size in MB: 2.36 MB of float32 for each rank
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "bench-manager"
ARMS: Mapping[str, tuple[str, ...]] = {
    "vllm+kernels": ("lora_kernels",),
    "ours+kernels": ("lora_lru_manager", "lora_kernels"),
}
NAMES = {
    "vllm+kernels": "vLLM's manager, our kernels",
    "ours+kernels": "ours",
}


def base_model() -> Path:
    """A random float32 Llama, grouped-query attention, `intermediate = 2 * hidden`."""
    home = CACHE / f"base-{HIDDEN}x{LAYERS}"
    if not home.exists():
        unfinished = home.with_name(f"{home.name}.{os.getpid()}")
        build_base(unfinished, hidden=HIDDEN, layers=LAYERS)
        os.replace(unfinished, home)
    return home


def adapter(base: Path, rank: int) -> Path:
    """A random adapter of all linear layers of `base`."""
    home = CACHE / f"adapter-{base.name}-r{rank}"
    if not home.exists():
        unfinished = home.with_name(f"{home.name}.{os.getpid()}")
        write_random_adapter(unfinished, base, rank)
        os.replace(unfinished, home)
    return home


def link(source: Path, directory: Path) -> Path:
    """The same bytes as another adapter: to vLLM, what counts is the path."""
    directory.mkdir(parents=True)
    shutil.copy(source / "adapter_config.json", directory)
    os.link(source / "adapter_model.safetensors", directory / "adapter_model.safetensors")
    return directory


def size_bytes(directory: Path) -> int:
    return (directory / "adapter_model.safetensors").stat().st_size


def warm_page_cache(directory: Path) -> None:
    with (directory / "adapter_model.safetensors").open("rb", buffering=0) as file:
        block = bytearray(1 << 22)
        while file.readinto(block):
            pass


def drop_page_cache(directory: Path) -> None:
    """Have the next read come from the disk."""
    with (directory / "adapter_model.safetensors").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Arm:
    """One running server of an arm."""

    name: str
    server: Server
    port: int


def rotated(arms: Sequence[Arm], number: int) -> Sequence[Arm]:
    """The arms in the order of this block or round: each begins as often as the others."""
    begin = number % len(arms)
    return [*arms[begin:], *arms[:begin]]


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
            running.append(Arm(arm, server, port_of(server.url)))
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})  # vLLM binds its compute threads to the other ones
        stack.callback(os.sched_setaffinity, 0, cores)  # which the next servers inherit
        yield running
