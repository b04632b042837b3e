"""What passes between the processes: commands and reports, and the questions and answers of vLLM's utilities.

Commands ride on vLLM's `SchedulerOutput`, in the order in which every worker has to carry them out; reports ride on its
`ModelRunnerOutput`. An adapter is named by its `key`, one for each generation: the `lora_int_id` that batches know it
by. A `job` is what takes longer than the step that it comes with, and is reported by its number when it is done. Both
are pickled with vLLM's own messages.

API servers (`server/planner_client.py`) call utilities of the engine core (`vllm_patches/engine_core/engine_core.py`).
vLLM carries their arguments and answers as msgpack without types (vllm/v1/serial_utils.py, 0.30 to 0.33), so both sides
convert: `to_plain` before sending, `from_plain` on arrival.
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
    """What a worker needs to know to load an adapter.

    Attributes:
        engine_id: vLLM's `lora_int_id`, one for each version.
        path: the adapter's directory, as the API server knows it.
        uri: where it was loaded from, for a worker that lacks the directory; None where its name says it.
        is_3d: whether it holds its experts' weights in one tensor each, as vLLM's `is_3d_lora_weight` says.
        size_bytes: what its files say that it will take of host memory.
        lora_request: the caller's own, where it is of a subclass of vLLM's: who wrote that knows how to load it.
        given: the number by which workers know what they were given past the plan, and nobody could load again.
    """

    engine_id: int
    name: str
    path: str
    uri: str | None = None
    is_3d: bool = False
    size_bytes: int = 0
    lora_request: Any = None
    given: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Load an adapter into host memory: in a background thread, or before this step's batch where that is shorter."""

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
    """From this step's batch on, what runs with `key` computes with the weights of `source`, which is gone then."""

    key: int
    source: int


Command = Load | Activate | Evict | Move


@dataclass(frozen=True, slots=True)
class Loaded:
    """Every worker has it in host memory.

    Attributes:
        size_bytes: host memory that it takes, of the worker where it takes most.
        is_instant: whether activating it costs no copy on any worker.
        load_s: the time that loading took.
        rank: the largest of any module.
    """

    job: int
    size_bytes: int
    is_instant: bool
    load_s: float
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Activated:
    """Every worker has it in its slot; `activate_s` is what writing the slot took."""

    job: int
    activate_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker could not load or activate it; it is in no slot, and in no host memory once it is evicted."""

    job: int
    error: LoRAPluginsError


@dataclass(frozen=True, slots=True)
class Slots:
    """What a worker has slots of: `copied` ones are written, and come first; `pointed` ones point at packed weights."""

    copied: int
    pointed: int = 0

    @property
    def total(self) -> int:
        """Adapters that one batch can compute with."""
        return self.copied + self.pointed


@dataclass(frozen=True, slots=True)
class Change:
    """A worker was given an adapter past the plan, or was told to remove one (`spec` is None)."""

    engine_id: int
    spec: AdapterSpec | None = None


Report = Loaded | Activated | Failed


def merged(reports: Sequence[Report]) -> Report:
    """One report of all workers' for the same job: it takes as much, and took as long, as where it is most."""
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
    """What came of a load, a pin or a retirement: `load_s` is None where it was loaded before."""

    size_bytes: int = 0
    load_s: float | None = None
    error: LoRAPluginsError | None = None


@dataclass(frozen=True, slots=True)
class AdapterState:
    """One adapter in one engine: where it is, and the ids of the requests that are held and that run.

    `rank` is 0 until it has been loaded.
    """

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
class PlannerFigures:
    """What one engine's planner says for metrics; `slots`: adapters that can run at once; `loaded`: no request ids."""

    slots: int
    held: int
    host_bytes: int
    host_max_adapters: int
    host_max_bytes: int | None
    loaded: tuple[AdapterState, ...]
    stats: Stats


def to_plain(message: Any) -> Any:
    """A message, or several, as dicts and lists of plain values; a copy. An error of ours is its `plain()`."""
    return msgspec.to_builtins(message, enc_hook=LoRAPluginsError.plain)


def from_plain(kind: type[T], plain: Any) -> T:
    """The message of this type that `to_plain` made `plain` of.

    Raises:
        msgspec.ValidationError: it is none.
    """
    return msgspec.convert(plain, kind, dec_hook=lambda _, error: error_of(error))
