"""What the GPU benchmark measures, and what it could cost at best: cases, bytes that must move, goals; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

MODELS: Mapping[str, Mapping[str, tuple[int, tuple[int, ...]]]] = {
    # layer: input width, output slices
    "Llama-8B": {
        "qkv": (4096, (4096, 1024, 1024)),
        "o": (4096, (4096,)),
        "gate_up": (4096, (14336, 14336)),
        "down": (14336, (4096,)),
    },
    "Llama-70B": {
        "qkv": (8192, (8192, 1024, 1024)),
        "o": (8192, (8192,)),
        "gate_up": (8192, (28672, 28672)),
        "down": (28672, (8192,)),
    },
}
DECODE_ROWS, PREFILL_ROWS = (1, 16, 64, 256), (2048, 8192)
ADAPTERS = (1, 4, 16, 64)
# Rank, rank of the slots. What the goals are about comes first, so that a run that is cut short has it.
RANKS = ((16, 16), (16, 128), (64, 64), (8, 16), (128, 128), (16, 256), (32, 64), (64, 256), (128, 256), (8, 128))


@dataclass(frozen=True)
class Case:
    """One call of one layer; its rows have `adapters` adapters, evenly, all of `rank` in slots of `slot_rank`."""

    model: str
    layer: str
    rows: int
    adapters: int
    rank: int
    slot_rank: int

    @property
    def n_in(self) -> int:
        return MODELS[self.model][self.layer][0]

    @property
    def widths(self) -> tuple[int, ...]:
        return MODELS[self.model][self.layer][1]

    @property
    def prefill(self) -> bool:
        return self.rows in PREFILL_ROWS

    def slot_of_row(self) -> list[int]:
        """Decoding rows take adapters in turn; prompts lie in one piece each."""
        if self.prefill:
            return [row * self.adapters // self.rows for row in range(self.rows)]
        return [row % self.adapters for row in range(self.rows)]

    def floor_bytes(self, itemsize: int = 2) -> int:
        """Bytes that must move: x and the used adapters once in, y once in and out. Nothing in between is counted."""
        weights = self.adapters * self.rank * sum(self.n_in + width for width in self.widths)
        return itemsize * (self.rows * (self.n_in + 2 * sum(self.widths)) + weights)

    def floor_us(self, bytes_per_s: float, itemsize: int = 2) -> float:
        """`floor_bytes` at the measured bandwidth of a copy, which counts each byte in and out."""
        return self.floor_bytes(itemsize) / bytes_per_s * 1e6


def cases() -> Iterator[Case]:
    """All cases, what matters most first: 8B before 70B, the goals' ranks before others."""
    for model in MODELS:
        for rank, slot_rank in RANKS:
            for rows in (*DECODE_ROWS, *PREFILL_ROWS):
                for layer in MODELS[model]:
                    for adapters in ADAPTERS:
                        if adapters <= rows:
                            yield Case(model, layer, rows, adapters, rank, slot_rank)


def by_weights(some: Iterable[Case]) -> list[list[Case]]:
    """Cases that can share one set of weights (that of the most adapters), in the order in which each first comes."""
    groups: dict[tuple[str, str, int, int], list[Case]] = {}
    for case in some:
        groups.setdefault((case.model, case.layer, case.rank, case.slot_rank), []).append(case)
    return list(groups.values())


def row(case: Case, us: Mapping[str, float], floor_us: float) -> dict[str, object]:
    """One line of the results: the case, microseconds by name (`ours graph`, `vllm eager`, ...), and ratios."""
    result: dict[str, object] = {**asdict(case), **{f"{name} us": round(value, 3) for name, value in us.items()}}
    result["floor us"] = round(floor_us, 3)
    for how in ("graph", "eager"):
        ours, theirs = us.get(f"ours {how}"), us.get(f"vllm {how}")
        if ours and theirs:
            result[f"vllm/ours {how}"] = round(theirs / ours, 3)
        if ours:
            result[f"ours/floor {how}"] = round(ours / floor_us, 3)
    return result


def goals(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The three goals of the issue over the measured cases, in CUDA graphs: how many hold, the worst, the median."""
    same = [r for r in rows if r["rank"] == r["slot_rank"]]
    padded = [r for r in rows if (r["rank"], r["slot_rank"]) == (16, 128)]
    decode = [r for r in rows if int(str(r["rows"])) >= 64 and r["rows"] not in PREFILL_ROWS]
    return [
        _goal("never slower than vLLM's where rank equals slot rank", same, "vllm/ours graph", least=1.0),
        _goal("at least twice as fast at rank 16 in slots of 128", padded, "vllm/ours graph", least=2.0),
        _goal("decode within 1.5 times the floor from 64 rows on", decode, "ours/floor graph", most=1.5),
    ]


def _goal(
    text: str,
    rows: Sequence[Mapping[str, object]],
    figure: str,
    *,
    least: float | None = None,
    most: float | None = None,
) -> dict[str, object]:
    values = [float(str(row[figure])) for row in rows if figure in row]
    if not values:
        return {"goal": text, "measured": 0}
    held = [value for value in values if (least is None or value >= least) and (most is None or value <= most)]
    return {
        "goal": text,
        "measured": len(values),
        "held": len(held),
        "worst": min(values) if least is not None else max(values),
        "median": round(median(values), 3),
    }
