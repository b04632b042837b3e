"""What the GPU benchmark measures, and what it could cost at best: cases, bytes that must move, goals; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import median

Layers = Mapping[str, tuple[int, tuple[int, ...]]]  # layer: input width, output slices


def _layers(hidden: int, key_value: int, intermediate: int) -> Layers:
    return {
        "qkv": (hidden, (hidden, key_value, key_value)),
        "o": (hidden, (hidden,)),
        "gate_up": (hidden, (intermediate, intermediate)),
        "down": (intermediate, (hidden,)),
    }


LLAMA_8B = _layers(4096, 1024, 14336)
MODELS: dict[str, Layers] = {"Llama-8B": LLAMA_8B, "Llama-70B": _layers(8192, 1024, 28672)}
TINY = _layers(32, 16, 48)  # for rehearsals
DECODE_ROWS, PREFILL_ROWS = (1, 4, 16, 64, 256, 1024), (2048, 8192)
ADAPTERS = (1, 4, 16, 64)
# Slots of the server, and how many of them have rows in a batch: what users have.
SLOTS = ((64, 1), (64, 4), (64, 16), (128, 4), (128, 16))
SHARES = {1: 0.95, 4: 0.92, 16: 0.92}  # of the base model's speed that a model keeps, by active adapters
# Rank, rank of the slots, of adapters that fill all slots. What the goals are about comes first.
RANKS = ((16, 16), (16, 128), (64, 64), (8, 16), (128, 128), (16, 256), (32, 64))


@dataclass(frozen=True)
class Case:
    """One call of one layer of a server with `slots` slots (0: one for each adapter) of rank `slot_rank`.

    Rows take the adapters evenly. All have `rank`, or where `mixed` each next one half of the rank before, down to 8.
    With `base_rows` every other row has no adapter.
    """

    model: str
    layer: str
    rows: int
    adapters: int
    rank: int
    slot_rank: int
    slots: int = 0
    mixed: bool = False
    base_rows: bool = False

    @property
    def n_in(self) -> int:
        return MODELS[self.model][self.layer][0]

    @property
    def widths(self) -> tuple[int, ...]:
        return MODELS[self.model][self.layer][1]

    @property
    def n_slots(self) -> int:
        return self.slots or self.adapters

    @property
    def prefill(self) -> bool:
        return self.rows in PREFILL_ROWS

    def slot_of(self, adapter: int) -> int:
        """Adapters lie apart from each other where there are more slots."""
        return adapter * self.n_slots // self.adapters

    def rank_of_slot(self, slot: int) -> int:
        """Of the adapter in the slot; one that no row uses has one too."""
        if not self.mixed:
            return self.rank
        halvings = max(1, (self.rank // 8).bit_length())
        return self.rank >> slot * self.adapters // self.n_slots % halvings

    def slot_of_row(self) -> list[int]:
        """Decoding rows take adapters in turn; prompts lie in one piece each."""
        if self.prefill:
            return [self.slot_of(row * self.adapters // self.rows) for row in range(self.rows)]
        if self.base_rows:
            return [-1 if row % 2 else self.slot_of(row // 2 % self.adapters) for row in range(self.rows)]
        return [self.slot_of(row % self.adapters) for row in range(self.rows)]

    def floor_bytes(self, itemsize: int = 2) -> int:
        """Bytes that must move: x and the used adapters once in, y once in and out; of rows with an adapter."""
        return self._bytes(itemsize, self.rank_of_slot)

    def slot_bytes(self, itemsize: int = 2) -> int:
        """Bytes that move where a used slot is read whole, as vLLM's operators do."""
        return self._bytes(itemsize, lambda _: self.slot_rank)

    def _bytes(self, itemsize: int, rank_of: Callable[[int], int]) -> int:
        used = {slot for slot in self.slot_of_row() if slot >= 0}
        rows = sum(slot >= 0 for slot in self.slot_of_row())
        weights = sum(map(rank_of, used)) * sum(self.n_in + width for width in self.widths)
        return itemsize * (rows * (self.n_in + 2 * sum(self.widths)) + weights)

    def floor_us(self, bytes_per_s: float) -> float:
        """`floor_bytes` at the measured bandwidth of a copy, which counts each byte in and out."""
        return self.floor_bytes() / bytes_per_s * 1e6


def cases() -> Iterator[Case]:
    """All cases, what matters most first: what users have, then slots that are all in use, then a larger model."""
    for rank, slot_rank, mixed in ((16, 128, False), (16, 16, False), (64, 64, True), (16, 64, False)):
        for rows in DECODE_ROWS:
            for slots, adapters in SLOTS:
                for layer in MODELS["Llama-8B"]:
                    if adapters <= rows:
                        case = Case("Llama-8B", layer, rows, adapters, rank, slot_rank, slots, mixed)
                        yield case
                        if mixed and slots == 64 and 2 * adapters <= rows:
                            yield replace(case, base_rows=True)
    for model, layers in MODELS.items():
        for rank, slot_rank in RANKS:
            for rows in (*DECODE_ROWS, *PREFILL_ROWS):
                for layer in layers:
                    for adapters in ADAPTERS:
                        if adapters <= rows:
                            yield Case(model, layer, rows, adapters, rank, slot_rank)


def rehearsed() -> list[Case]:
    """A few of every kind, for a rehearsal with `TINY` layers."""
    return [
        Case("Llama-8B", "qkv", 4, 2, 16, 32, slots=6),
        Case("Llama-8B", "down", 6, 2, 32, 32, slots=4, mixed=True, base_rows=True),
        Case("Llama-8B", "qkv", 4, 2, 16, 16),
    ]


def by_weights(some: Iterable[Case]) -> list[list[Case]]:
    """Cases that can share one set of weights (that of the most slots), in the order in which each first comes."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in some:
        kind = (case.model, case.layer, case.rank, case.slot_rank, case.mixed, case.slots)
        groups.setdefault(kind, []).append(case)
    return list(groups.values())


def row(case: Case, us: Mapping[str, float], floor_us: float) -> dict[str, object]:
    """One line of the results: the case, microseconds by name (`ours graph`, `vllm eager`, ...), and ratios.

    `vllm/ours` takes the faster of vLLM's ways. `base` is the layer's own product of matrices.
    """
    result: dict[str, object] = {**asdict(case), **{f"{name} us": round(value, 3) for name, value in us.items()}}
    result["floor us"] = round(floor_us, 3)
    for how in ("graph", "eager"):
        ours = us.get(f"ours {how}")
        theirs = [value for name, value in us.items() if name.startswith("vllm") and name.endswith(how)]
        if ours and theirs:
            result[f"vllm/ours {how}"] = round(min(theirs) / ours, 3)
        if ours:
            result[f"ours/floor {how}"] = round(ours / floor_us, 3)
    return result


def goals(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The goals over the measured cases, in CUDA graphs."""
    padded = [r for r in rows if (r["rank"], r["slot_rank"], r["slots"], r["adapters"]) == (16, 128, 64, 16)]
    decode = [r for r in rows if int(str(r["rows"])) >= 64 and r["rows"] not in PREFILL_ROWS]
    return [
        goal("never slower than vLLM's operators", rows, "vllm/ours graph", least=1.0),
        goal("at least twice as fast at rank 16 in slots of 128, 16 of 64 active", padded, "vllm/ours graph", least=2),
        goal("decode within 1.5 times the floor from 64 rows on", decode, "ours/floor graph", most=1.5),
        *(
            goal(
                f"{adapters} of 64 adapters of rank 16: {least:.0%} of base",
                _steps(rows, adapters),
                "share",
                least=least,
            )
            for adapters, least in SHARES.items()
        ),
    ]


def _steps(rows: Sequence[Mapping[str, object]], adapters: int) -> Iterator[dict[str, object]]:
    """What the layers of a model take together: the share of the base model's products, where all were measured.

    Norms, attention and the head are left out, so a whole step takes longer, and adapters a smaller share of it.
    """
    steps: dict[object, list[Mapping[str, object]]] = {}
    for row in rows:
        if (row["rank"], row["slots"], row["adapters"]) == (16, 64, adapters) and "base graph us" in row:
            steps.setdefault((row["model"], row["slot_rank"], row["rows"]), []).append(row)
    for (model, _, _), layers in steps.items():
        if {row["layer"] for row in layers} == set(MODELS[model]):
            base, ours = (sum(float(str(row[f"{name} graph us"])) for row in layers) for name in ("base", "ours"))
            yield {"share": base / (base + ours)}


def goal(
    text: str, rows: Iterable[Mapping[str, object]], figure: str, *, least: float = 0.0, most: float = inf
) -> dict[str, object]:
    """How many of the rows that have the figure hold it, the worst and the median."""
    values = [float(str(row[figure])) for row in rows if figure in row]
    if not values:
        return {"goal": text, "measured": 0}
    return {
        "goal": text,
        "measured": len(values),
        "held": sum(least <= value <= most for value in values),
        "worst": max(values) if most < inf else min(values),
        "median": round(median(values), 3),
    }
