"""What becomes of each kind of adapter on one architecture: our verdict, vLLM's, and whether the answers are right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from testbed.architectures import Architecture
from testbed.forked_engines import ForkedEngines

_ROUNDING = 1e-4  # of embeddings and probabilities, which have no tokens


@dataclass(frozen=True)
class Row:
    """One adapter on one model; texts are empty where there is nothing to say.

    Attributes:
        kind: of adapter; empty for the base model alone.
        reference: who says what the answer should be, PEFT or vLLM's own loading without our plugins.
        refused: our error.
        vllm: why vLLM's own loading does not take the adapter whole.
        stored: why it does not take what our resolver made of it.
        is_right: whether the answer is the reference's, token for token, or to `_ROUNDING`; None where there is no
            answer, because the adapter is refused, or because its model was only made.
        differs_from_base: whether the reference's answer is another one than the base model's.
        not_made: why PEFT makes no such adapter; the rest says nothing then.
    """

    architecture: str
    kind: str
    reference: str
    refused: str = ""
    vllm: str = ""
    stored: str = ""
    is_right: bool | None = None
    differs_from_base: bool = False
    not_made: str = ""


def examine(engines: ForkedEngines, architecture: Architecture, directory: Path) -> list[Row]:
    """Make the model and adapters of all kinds under `directory`, and serve them; the base model is the kind ""."""
    is_peft_right = architecture.has_peft and architecture.is_peft_right
    with engines.engine(architecture, directory) as engine:
        right = engine.call("build")
        plain = engine.call("start" if architecture.is_computed else "make")
        kinds = [kind for kind, answer in right.items() if kind and not isinstance(answer, str)]
        if not architecture.has_peft:
            kinds = engine.call("build_from_description", plain)
        computed = [kind for kind in kinds if architecture.computes(kind)]
        verdicts = {kind: engine.call("verdict", kind) for kind in computed}
        found = engine.call("answers", computed) if computed else {}
    if len(computed) < len(kinds):
        with engines.engine(architecture, directory) as engine:
            engine.call("make")
            verdicts |= {kind: engine.call("verdict", kind) for kind in kinds if kind not in computed}
    if not is_peft_right:
        with engines.engine(architecture, directory, with_plugins=False) as engine:
            engine.call("start")
            right |= engine.call("answers", [kind for kind in computed if not verdicts[kind][1]])
    rows = []
    for kind in ("", *architecture.kinds()):
        row = Row(architecture.label, kind, "PEFT" if is_peft_right else "vLLM")
        if kind and kind not in kinds:
            rows.append(replace(row, not_made=str(right[kind])))
            continue
        refused, vllm, stored = verdicts[kind] if kind else ("", "", "")
        is_right = same(found[kind], right.get(kind)) if architecture.computes(kind) and not refused else None
        differs = not same(right.get(kind), right[""])
        rows.append(
            replace(row, refused=refused, vllm=vllm, stored=stored, is_right=is_right, differs_from_base=differs)
        )
    return rows


def same(one: Sequence[float] | str | None, other: Sequence[float] | str | None) -> bool:
    """Whether two answers are the same tokens, or the same numbers but for rounding."""
    if one is None or other is None or isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and all(map(lambda a, b: math.isclose(a, b, abs_tol=_ROUNDING), one, other))
