"""What the planner tells the workers, and what they report; plain values, pickled with vLLM's own messages.

Commands ride on vLLM's `SchedulerOutput`, in the order in which every worker has to carry them out; reports ride on its
`ModelRunnerOutput`. An adapter is named by its `engine_id`, vLLM's `lora_int_id`; a `job` is what takes longer than the
step that brings it, and is reported by its number when it is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_plugins.errors import LoRAPluginsError


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What a worker needs to know to load an adapter.

    Attributes:
        engine_id: vLLM's `lora_int_id`, one for each version.
        path: the adapter's directory, as the API server knows it.
        uri: where it was loaded from, for a worker that lacks the directory; None where its name says it.
        is_3d: whether it holds its experts' weights in one tensor each, as vLLM's `is_3d_lora_weight` says.
        size_bytes: what its files say that it will take of host memory.
    """

    engine_id: int
    name: str
    path: str
    uri: str | None = None
    is_3d: bool = False
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Notify:
    """A local socket on which somebody waits for the end of a load, before the step is over that reports it."""

    address: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Load:
    """Bring an adapter into host memory in a background thread; then into `slot`, unless that is None."""

    spec: AdapterSpec
    job: int
    slot: int | None = None
    notify: Notify | None = None


@dataclass(frozen=True, slots=True)
class Activate:
    """Put a loaded adapter into a slot: as a job in the background; without one, before this step's batch runs."""

    engine_id: int
    slot: int
    job: int | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """Forget an adapter: its host memory, and its slot if it has one."""

    engine_id: int


Command = Load | Activate | Evict


@dataclass(frozen=True, slots=True)
class Loaded:
    """Every worker has it in host memory.

    Attributes:
        size_bytes: host memory that it takes, of the worker where it takes most.
        is_instant: whether activating it costs no copy on any worker.
        load_s: the time that loading took.
    """

    job: int
    size_bytes: int
    is_instant: bool
    load_s: float


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


Report = Loaded | Activated | Failed
