"""PEFT's answers on this machine, and the modules at fault where a server's answers are not the trained adapter's.

Runs in the process of `compare --peft`, with torch and PEFT. In: an adapter's directory, and the server's answers. Out:
the trained answers, and one line that names the cause. An *answer* to a prompt is the logarithm of the probability of
each token but the first. Here PEFT computes answers of the adapter with a group of its modules left out, or scaled: the
group is at fault whose answers equal the server's. A group is one projection of all layers, a layer, the last layers,
or one module of a layer. A *kind* is something that the whole adapter has beside A and B, such as DoRA's magnitudes.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.cli import UsageProblem

_MOST_GROUPS = 3  # at fault together; for each, all groups are tried
_CLEARLY = 0.7  # a group explains nothing if more than this part of the distance remains without the group
# By module or kind, the factor of its contribution; 0 leaves it out. A kind is only ever left out.
Factors = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Trained:
    """A prompt, the answer of the whole adapter, and the base model's own answer; None where not known."""

    prompt: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...] | None


def apart(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the absolute differences of two answers, token by token."""
    return [abs(one - other) for one, other in zip(some, others, strict=True)]


class ByPeft:
    """A base model in its own dtype with one adapter, as PEFT loads both.

    Args:
        directory: the adapter's. base: the base model's path or Hub id; None for the one that the adapter names.

    Attributes:
        modules: the names of the adapter's modules. ranks: of the modules with A and B.
        kinds: what the adapter has beside A and B, in words.
        trains_head: whether the module that makes logits is among the modules.

    Raises:
        UsageProblem: there is no adapter, or torch, Transformers or PEFT are not installed.
    """

    def __init__(self, directory: Path, base: str | None) -> None:
        if not (directory / CONFIG_FILE).is_file():
            raise UsageProblem(f"--peft {directory}: no directory with {CONFIG_FILE}")
        try:
            import torch
            from peft import PeftConfig, PeftModel
            from peft.tuners.tuners_utils import BaseTunerLayer
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise UsageProblem(f"--peft needs torch, transformers and peft: {error}") from None
        self._torch = torch
        with contextlib.redirect_stderr(io.StringIO()):  # drop progress bars
            base = base or str(PeftConfig.from_pretrained(str(directory)).base_model_name_or_path)
            self._tokenizer = AutoTokenizer.from_pretrained(base)
            plain = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
            # The base model's biases as they are before PEFT replaces some by trained biases.
            own = [(one, one.detach().clone()) for name, one in plain.named_parameters() if name.endswith("bias")]
            self._model: Any = PeftModel.from_pretrained(plain, str(directory)).eval()
        named = {name: one for name, one in self._model.named_modules() if isinstance(one, BaseTunerLayer)}
        # Trained tokens are a kind, and no module of their own.
        of_tokens = [named.pop(name) for name in [*named] if name.endswith(".token_adapter")]
        # By the names that the adapter's weights file has for modules.
        self._layers: dict[str, Any] = {name.removeprefix("base_model.model."): one for name, one in named.items()}
        self.modules = [*self._layers]
        with_rank = {name: one for name, one in self._layers.items() if hasattr(one, "r")}  # not IA3's
        self.ranks = {name: max(one.r.values()) for name, one in with_rank.items()}
        sides = (side for one in with_rank.values() for side in one.lora_B.values())
        biases = [side.bias for side in sides if getattr(side, "bias", None) is not None]
        kinds: dict[str, list[_Without]] = {
            "DoRA's magnitudes": [(one, "lora_variant", {}) for one in with_rank.values() if one.lora_variant],
            "the biases of B": [(bias, "data", torch.zeros_like(bias)) for bias in biases],
            # PEFT puts these into the base model's own layers, and does not take them out for the base's answers.
            "the trained biases": [(one, "data", before) for one, before in own if not torch.equal(one, before)],
            "the trained tokens": [_disabled(one) for one in of_tokens],
        }
        self._without = {name: [_disabled(one)] for name, one in self._layers.items()} | kinds
        self.kinds = [kind for kind, parts in kinds.items() if parts]
        # By identity: the name of the module that makes logits differs from model to model.
        self.trains_head = any(one is self._model.get_output_embeddings() for one in self._layers.values())

    def logprobs(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logarithm of the probability of each token but the first."""
        with self._torch.inference_mode():
            # In float32: rounding of a smaller dtype would hide small differences.
            logits = self._model(input_ids=self._torch.tensor([ids])).logits[0, :-1].float()
        return tuple(logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist())

    def trained(self, prompt: str) -> Trained:
        """Return the answers to a prompt of two tokens or more, with the adapter and without."""
        ids = tuple(self._tokenizer(prompt)["input_ids"])
        if len(ids) < 2:  # the first token has no probability, so there would be no answer
            raise UsageProblem(f"--prompts: {prompt!r} is less than two tokens")
        with warnings.catch_warnings(action="ignore"), self._model.disable_adapter(), self.scaled(self.nothing):
            without = self.logprobs(ids)
        return Trained(prompt, ids, self.logprobs(ids), without)

    @contextlib.contextmanager
    def scaled(self, factors: Factors) -> Iterator[None]:
        """Scale the contributions of modules and kinds by `factors` while the block runs."""
        with contextlib.ExitStack() as stack:
            for name, factor in factors.items():
                parts = self._without[name]
                if factor:  # scale the module, and do not leave it out
                    layer = self._layers[name]
                    parts = [(layer, "scaling", {key: factor * value for key, value in layer.scaling.items()})]
                for owner, attribute, value in parts:
                    stack.callback(setattr, owner, attribute, getattr(owner, attribute))
                    setattr(owner, attribute, value)
            yield

    @property
    def nothing(self) -> Factors:
        """The factors that leave out the whole adapter, so that only the base model answers."""
        return dict.fromkeys([*self.modules, *self.kinds], 0.0)


# How to leave out a part of an adapter: an object of PEFT's, the name of its attribute, and the value to set.
_Without = tuple[Any, str, Any]


def _disabled(layer: Any) -> _Without:
    return layer, "_disable_adapters", True


def at_fault(trained: Sequence[Trained], served: Sequence[Sequence[float]], right: float, model: ByPeft) -> str:
    """Return a line that names the cause, or the closest cause.

    Args:
        trained: the prompts, with the whole adapter's answers.
        served: the server's answer to each of these prompts.
        right: the largest difference at which two answers count as equal.
        model: the adapter, parts of which are left out or scaled.
    """
    # Of each prompt, the largest difference between the trained answer and the server's answer.
    away = [max(apart(one.logprobs, answer)) for one, answer in zip(trained, served, strict=True)]
    if not all(map(math.isfinite, away)):
        return "at fault: the server's answers are not finite"
    worst = away.index(max(away))

    def distances(factors: Factors, at: int) -> list[float]:
        """The differences from the server's answer to a prompt, by its index, with the adapter changed by `factors`."""
        with model.scaled(factors):
            return apart(model.logprobs(trained[at].token_ids), served[at])

    def left(factors: Factors) -> float:
        """The distance that `factors` leave: the mean difference from the server's answer to the worst prompt."""
        found = distances(factors, worst)
        return sum(found) / len(found)

    def explains(factors: Factors) -> bool:
        # The worst prompt first: most causes fail to explain it, and each further prompt costs a pass of the model.
        return left(factors) <= right and all(max(distances(factors, at)) <= right for at in range(len(trained)))

    for text, factors in _changes(model).items():
        if explains(factors):
            return f"at fault: served as if {text}"
    # No single change explains the answers: look for groups of modules, coarse groups first.
    begin, tries = left({}), list[tuple[float, list[str]]]()
    for groups in _groupings(model.modules):
        now, chosen = _greedily(left, groups, begin, right)
        if now <= right and explains({name: 0.0 for text in chosen for name in groups[text]}):
            return f"at fault: served as if missing: {', '.join(chosen)}"
        tries.append((now, chosen))
    best, closest = min(tries)
    if not closest:
        return "at fault: no group of modules; swapped, renamed or other weights, or another base model"
    # No groups explain the answers wholly: name the groups that come closest.
    gone = 100 * (1 - best / begin)
    return f"at fault, in part: {', '.join(closest)}; without them {gone:.0f} % of the difference is gone"


def _greedily(
    left: Callable[[Factors], float], groups: Mapping[str, Factors], now: float, right: float
) -> tuple[float, list[str]]:
    """Leave out one group after the other, each time the group that brings the adapter closest to the server's answers.

    Returns the distance left, and the names of the groups left out. `left` gives the distance for factors, and `now` is
    the distance of the whole adapter. Ends at a distance of `right`, or where no group takes away enough.
    """
    chosen, gone = list[str](), dict[str, float]()
    while now > right and len(chosen) < min(_MOST_GROUPS, len(groups)):
        tried = {text: left({**gone, **groups[text]}) for text in groups if text not in chosen}
        text = min(tried, key=lambda one: tried[one])
        if tried[text] > _CLEARLY * now:
            break
        now, chosen, gone = tried[text], [*chosen, text], {**gone, **groups[text]}
    return now, chosen


def _changes(model: ByPeft) -> dict[str, Factors]:
    """Return single causes, in words, with their factors: a wrong configuration, a missing kind, no adapter at all."""
    ranks = model.ranks
    scalings = {
        "alpha were doubled": dict.fromkeys(ranks, 2.0),
        "alpha were halved": dict.fromkeys(ranks, 0.5),
        "alpha had the other sign": dict.fromkeys(ranks, -1.0),
        "use_rslora were false, and it was trained with true": {name: rank**-0.5 for name, rank in ranks.items()},
        "use_rslora were true, and it was trained with false": {name: rank**0.5 for name, rank in ranks.items()},
    }
    missing = {f"{kind} were missing": {kind: 0.0} for kind in model.kinds}
    return (scalings if ranks else {}) | missing | {"the whole adapter were missing": model.nothing}


def _groupings(modules: Sequence[str]) -> Iterator[dict[str, Factors]]:
    """Yield groups of modules left out, coarse groups first: they take fewer passes, and say more."""
    projections: dict[str, dict[str, float]] = {}
    layers: dict[str, dict[str, float]] = {}
    for name in modules:
        projections.setdefault(f"`{name.rpartition('.')[2]}` of all layers", {})[name] = 0.0
        if (found := re.search(r"\.(\d+)\.", name)) is not None:
            layers.setdefault(f"layer {found[1]}", {})[name] = 0.0
    some = list(layers.values())  # in the order of the layers
    yield dict(projections)
    yield dict(layers)
    yield {
        f"the last {n} layers": dict.fromkeys([it for one in some[-n:] for it in one], 0.0) for n in range(2, len(some))
    }
    yield {f"`{name}`": {name: 0.0} for name in modules}
