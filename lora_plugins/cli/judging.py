"""Whether answers are the trained answers: logarithms of probabilities, in multiples of a noise floor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_plugins.cli import UsageProblem

# Of a floor, largest and mean: float32's own rounding, in logarithms of probabilities. Of tokens that a model holds for
# next to impossible, adapters round ten times as far as their base model.
_SMALLEST_LARGEST, _SMALLEST_MEAN = 1e-4, 1e-5
_SHOWN = 40  # characters of a prompt
_FARTHEST = 0.5  # mean floor of one model in two dtypes, or quantised; beyond, the two models differ
OK, OUT, AS_BASE = "ok", "out", "out: answers as the base model"
UNSEEN, OTHER_BASE = "cannot tell: trained to almost no effect", "cannot tell: the base models differ"


@dataclass(frozen=True, slots=True)
class Trained:
    """One trained prompt: of each token but the first its logarithm of probability; the base model's too."""

    prompt: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt: its largest and mean difference of logarithms of probabilities, in multiples of the floor."""

    prompt: str
    tokens: int
    largest: float
    mean: float
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (repr(self.prompt[:_SHOWN]), str(self.tokens), f"{self.largest:.1f}", f"{self.mean:.1f}", self.verdict)


def judge(
    trained: Sequence[Trained], by_adapter: Sequence[Sequence[float]], by_base: Sequence[Sequence[float]], limit: float
) -> tuple[tuple[float, float], list[Compared]]:
    """Return the floor, largest and mean, and a verdict for each prompt."""
    both = [(served, one.base_logprobs) for one, served in zip(trained, by_base, strict=True)]
    floors = [one for served, plain in both if plain is not None for one in apart(served, plain)]
    largest_floor, mean_floor = max(*floors, _SMALLEST_LARGEST), max(sum(floors) / len(floors), _SMALLEST_MEAN)
    rows = []
    for one, adapted, plain in zip(trained, by_adapter, by_base, strict=True):
        away = apart(adapted, one.logprobs)
        largest, mean = max(away) / largest_floor, sum(away) / len(away) / mean_floor
        if mean_floor > _FARTHEST:
            verdict = OTHER_BASE
        elif not largest <= limit >= mean:  # NaN is out
            verdict = AS_BASE if max(apart(adapted, plain)) <= limit * largest_floor else OUT
        else:
            verdict = UNSEEN if max(apart(one.logprobs, one.base_logprobs or plain)) <= limit * largest_floor else OK
        rows.append(Compared(one.prompt, len(one.token_ids), largest, mean, verdict))
    return (largest_floor, mean_floor), rows


def apart(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return how far each number is from its other."""
    return [abs(one - other) for one, other in zip(some, others, strict=True)]


def read_trained(path: Path) -> Iterator[Trained]:
    """Yield a trainer's records: an object a line.

    Raises:
        UsageProblem: the file cannot be read, is something else, or has no answers of the base model.
    """
    has_floor = False
    for place, text in enumerate(lines_of(path, "--trainer"), 1):
        try:
            raw = json.loads(text)
            ids = tuple(map(int, raw["token_ids"]))
            logprobs = _after_the_first(raw["logprobs"], len(ids))
            plain = raw.get("base_logprobs")
            base = None if plain is None else _after_the_first(plain, len(ids))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = f"line {place} of {path} is no object with token_ids, logprobs and base_logprobs"
            raise UsageProblem(f"--trainer: {what} ({type(error).__name__}: {error})") from None
        has_floor = has_floor or base is not None
        yield Trained(str(raw.get("prompt", f"line {place}")), ids, logprobs, base)
    if not has_floor:
        why = "the base model's without the adapter, which say how far trainer and server are from each other anyway"
        raise UsageProblem(f"--trainer: no line of {path} has base_logprobs, {why}")


def _after_the_first(values: Sequence[Any], tokens: int) -> tuple[float, ...]:
    """Return a number for each token but the first: no model predicts the first, and trainers write null or nothing."""
    if tokens < 2 or len(values) not in (tokens, tokens - 1):
        raise ValueError(f"{len(values)} logprobs of {tokens} tokens")
    found = tuple(map(float, values[len(values) - tokens + 1 :]))
    if not all(map(math.isfinite, found)):
        raise ValueError("a number that is not finite")
    return found


def lines_of(path: Path, option: str) -> list[str]:
    """Return the lines of a file that an option names, without empty lines.

    Raises:
        UsageProblem: the file cannot be read, or has no lines.
    """
    try:
        lines = [text for text in path.read_text(encoding="utf-8-sig").splitlines() if text.strip()]
    except (OSError, ValueError) as error:
        raise UsageProblem(f"{option} {path}: cannot be read ({error})") from None
    if not lines:
        raise UsageProblem(f"{option} {path}: nothing in it")
    return lines
