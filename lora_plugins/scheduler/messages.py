"""Messages between the processes: commands and reports, and the questions and answers of vLLM's utilities.

vLLM's `SchedulerOutput` carries commands, in the order in which every worker executes them, and its `ModelRunnerOutput`
carries reports; both are pickled. A `key` names a generation of an adapter: the `lora_int_id` of batches. A `job` may
take longer than the step of its command, and is reported by number when done.

API servers (`lifecycle/planner_client.py`) call utilities of the engine core
(`vllm_patches/engine_core/engine_core.py`). vLLM carries their arguments and answers as msgpack without types
(vllm/v1/serial_utils.py, 0.30 to 0.33), so both sides convert: `to_plain` before sending, `from_plain` on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from lora_plugins.errors import LoRAPluginsError, error_of
from lora_plugins.scheduler.stats import Stats

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A worker's facts for loading an adapter.

    Attributes:
        engine_id: vLLM's `lora_int_id`, one for each version.
        path: the adapter's directory, as the API server knows it.
        uri: the source, for a worker that lacks the directory; None where the name is enough.
        size_bytes: host memory for the weights, as the files say; 0 for unknown.
        lora_request: the caller's own object of a subclass of vLLM's class, whose author knows how to load the adapter.
        given: the workers' number for weights that a caller gave past the plan: nobody could load them again.
    """

    engine_id: int
    name: str
    path: str
    uri: str | None = None
    size_bytes: int = 0
    lora_request: Any = None
    given: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Load an adapter into host memory, in a background thread."""

    spec: AdapterSpec
    key: int
    job: int


@dataclass(frozen=True, slots=True)
class Activate:
    """Put a loaded adapter into a slot: as a job in the background; without one, before this step's batch."""

    key: int
    slot: int
    job: int | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """Release an adapter's host memory, and its slot if it has one."""

    key: int


@dataclass(frozen=True, slots=True)
class Move:
    """From this step's batch on, compute requests of `key` with the weights of `source`; then `source` is gone."""

    key: int
    source: int


Command = Load | Activate | Evict | Move


@dataclass(frozen=True, slots=True)
class Loaded:
    """Every worker has the adapter in host memory.

    Attributes:
        size_bytes: of host memory, on the largest worker. is_instant: whether no worker copies to activate.
        load_s: the slowest worker's time. rank: the largest of any module.
    """

    job: int
    size_bytes: int
    is_instant: bool
    load_s: float
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Activated:
    """The next batches find the adapter in its slot; writing, on CUDA launching the copies, took `activate_s`."""

    job: int
    activate_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker could not load or activate the adapter, which is in no slot, and leaves host memory with `Evict`.

    Attributes:
        key: of an adapter whose slot could not be written before a step's batch, without a job; `job` is then 0. The
            batch, and all until the `Evict`, computed its rows without an adapter.
    """

    job: int
    error: LoRAPluginsError
    key: int = 0


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a worker: `copied` slots are written, and come first; `pointed` slots point at packed weights."""

    copied: int
    pointed: int = 0

    @property
    def total(self) -> int:
        """How many adapters one batch can compute with."""
        return self.copied + self.pointed


@dataclass(frozen=True, slots=True)
class Change:
    """A worker was given an adapter past the plan, or had to remove an adapter (`spec` is None)."""

    engine_id: int
    spec: AdapterSpec | None = None


Report = Loaded | Activated | Failed


def merged(reports: Sequence[Report]) -> Report:
    """One report of all workers for the same job: the largest size and rank, the longest time."""
    # Every worker has reported the job: the slowest and the largest decide.
    loaded = [report for report in reports if isinstance(report, Loaded)]
    if loaded:
        return Loaded(
            loaded[0].job,
            max(report.size_bytes for report in loaded),
            all(report.is_instant for report in loaded),
            max(report.load_s for report in loaded),
            max(report.rank for report in loaded),
        )
    activated = [report for report in reports if isinstance(report, Activated)]
    return Activated(activated[0].job, max(report.activate_s for report in activated))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a load, a pin or a retirement; `load_s` is None if the adapter was loaded before."""

    size_bytes: int = 0
    load_s: float | None = None
    error: LoRAPluginsError | None = None


@dataclass(frozen=True, slots=True)
class AdapterState:
    """One adapter in one engine: its place, and the ids of held and running requests; `rank` is 0 before a load."""

    engine_id: int
    name: str
    size_bytes: int = 0
    is_loaded: bool = False
    is_active: bool = False
    is_pinned: bool = False
    rank: int = 0
    held: tuple[str, ...] = ()
    running: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestsOfName:
    """A name's requests in one engine, or in all: ids as the engine knows them, and clients' requests that run."""

    request_ids: tuple[str, ...]
    clients: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannerFigures:
    """One planner's figures for metrics; `slots`: adapters that can run at once; `loaded`: without ids of requests."""

    slots: int
    held: int
    host_bytes: int
    host_max_adapters: int
    host_max_bytes: int | None
    loaded: tuple[AdapterState, ...]
    stats: Stats
    is_paused: bool = False  # the whole engine, by vLLM's own pause


def to_plain(message: Any) -> Any:
    """Return a message, or several, as dicts and lists of plain values; a copy. Our errors become their `plain()`."""
    return msgspec.to_builtins(message, enc_hook=LoRAPluginsError.plain)


def from_plain(kind: type[T], plain: Any) -> T:
    """Return the message of type `kind` that `to_plain` turned into `plain`.

    Raises:
        msgspec.ValidationError: `plain` is no such message.
    """
    return msgspec.convert(plain, kind, dec_hook=lambda _, error: error_of(error))
