"""PEFT's answers on this machine, and the modules at fault where a server's answers are not the trained adapter's.

The server's answers are compared with answers of the adapter with a group of its modules left out, or scaled: a group
with equal answers is at fault. Groups are a projection of all layers, a layer, and one module of a layer.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.cli import UsageProblem
from lora_plugins.cli.judging import Trained, apart

_MOST_GROUPS = 3  # at fault together; each costs a pass over all groups
_CLEARLY = 0.7  # of the remaining distance: a group whose omission takes away less explains nothing


class ByPeft:
    """A base model in its own dtype with one adapter, as PEFT loads both.

    Args:
        directory: the adapter's. base: another base model than the adapter names.

    Raises:
        UsageProblem: there is no adapter, or torch, Transformers or PEFT are not installed.
    """

    def __init__(self, directory: Path, base: str | None) -> None:
        if not (directory / CONFIG_FILE).is_file():
            raise UsageProblem(f"--peft {directory}: no directory with {CONFIG_FILE}")
        try:
            import torch
            from peft import PeftConfig, PeftModel
            from peft.tuners.lora import LoraLayer
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise UsageProblem(f"--peft needs torch, transformers and peft: {error}") from None
        self._torch = torch
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            base = base or str(PeftConfig.from_pretrained(str(directory)).base_model_name_or_path)
            self._tokenizer = AutoTokenizer.from_pretrained(base)
            plain = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
            self._model: Any = PeftModel.from_pretrained(plain, str(directory)).eval()
        # By the names in the adapter's own file.
        self._layers: dict[str, Any] = {
            name.removeprefix("base_model.model."): module
            for name, module in self._model.named_modules()
            if isinstance(module, LoraLayer)
        }

    @property
    def modules(self) -> list[str]:
        """The names of the adapter's modules."""
        return list(self._layers)

    @property
    def trains_head(self) -> bool:
        """Whether the adapter has the module that makes logits."""
        # By identity: the module's name differs from model to model.
        head = self._model.get_output_embeddings()
        return any(module is head for module in self._layers.values())

    def rank_of(self, module: str) -> int:
        """The rank of a module's pair."""
        (rank,) = self._layers[module].r.values()
        return int(rank)

    def logprobs(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logarithm of the probability of each token but the first."""
        with self._torch.inference_mode():
            # In float32: rounding of a smaller dtype would hide small differences.
            logits = self._model(input_ids=self._torch.tensor([ids])).logits[0, :-1].float()
        return tuple(logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist())

    def trained(self, prompts: Sequence[str]) -> list[Trained]:
        """Return each prompt's answers with the adapter and without.

        Raises:
            UsageProblem: a prompt of less than two tokens.
        """
        found = []
        for prompt in prompts:
            ids = tuple(self._tokenizer(prompt)["input_ids"])
            if len(ids) < 2:
                raise UsageProblem(f"--prompts: {prompt!r} is less than two tokens")
            with self._model.disable_adapter():
                without = self.logprobs(ids)
            found.append(Trained(prompt, ids, self.logprobs(ids), without))
        return found

    @contextlib.contextmanager
    def scaled(self, factors: Mapping[str, float]) -> Iterator[None]:
        """Scale the contributions of modules by `factors` while the block runs; 0 leaves a module out."""
        kept = {name: dict(self._layers[name].scaling) for name in factors}
        try:
            for name, factor in factors.items():
                self._layers[name].scaling = {key: factor * value for key, value in kept[name].items()}
            yield
        finally:
            for name, scaling in kept.items():
                self._layers[name].scaling = scaling


@dataclass(frozen=True)
class _Cause:
    """A possible change of the adapter: by how much each module is scaled, 0 where left out."""

    text: str
    factors: Mapping[str, float]


def at_fault(
    trained: Sequence[Trained], served: Sequence[Sequence[float]], right: float, model: ByPeft
) -> tuple[str, ...]:
    """Return lines that name the cause, or the closest cause.

    Args:
        trained: the prompts, with the whole adapter's answers.
        served: logarithms of probabilities of each prompt.
        right: a difference up to which two answers are the same.
        model: the adapter, parts of which are left out.
    """
    away = [max(apart(one.logprobs, answer)) for one, answer in zip(trained, served, strict=True)]
    if not all(map(math.isfinite, away)):
        return ("at fault: the server's answers are not finite",)
    search = _Search(trained, served, right, model, away.index(max(away)))
    for cause in _whole(model):
        if search.explains(cause.factors):
            return (f"at fault: served as if {cause.text}",)
    # No single change explains the answers: look for groups of modules, coarse groups first.
    begin = search.distance({})
    best = begin, list[_Cause]()
    for groups in _groupings(model.modules):
        left, chosen = search.of(groups, begin)
        if left <= right and search.explains(_together(chosen)):
            return (f"at fault: served as if missing: {_named(chosen)}",)
        best = min(best, (left, chosen), key=lambda one: one[0])
    left, chosen = best
    if not chosen:
        return ("at fault: no group of modules; swapped, renamed or other weights, or another base model",)
    gone = 100 * (1 - left / begin)
    return (f"at fault, in part: {_named(chosen)}; without them {gone:.0f} % of the difference is gone",)


@dataclass(frozen=True)
class _Search:
    """Looks for causes with which the adapter answers as the server does, by the prompt `worst` first."""

    trained: Sequence[Trained]
    served: Sequence[Sequence[float]]
    right: float
    model: ByPeft
    worst: int

    def distance(self, factors: Mapping[str, float]) -> float:
        """Return the mean over the tokens of the worst prompt, with modules scaled by `factors`."""
        answer = self.served[self.worst]
        with self.model.scaled(factors):
            return sum(apart(self.model.logprobs(self.trained[self.worst].token_ids), answer)) / len(answer)

    def explains(self, factors: Mapping[str, float]) -> bool:
        """Return whether the scaled adapter answers every prompt as the server does."""
        # One prompt first: most causes fail there, and each prompt costs a pass of the model.
        if self.distance(factors) > self.right:
            return False
        with self.model.scaled(factors):
            both = zip(self.trained, self.served, strict=True)
            return all(max(apart(self.model.logprobs(one.token_ids), answer)) <= self.right for one, answer in both)

    def of(self, groups: Sequence[_Cause], begin: float) -> tuple[float, list[_Cause]]:
        """Return the distance left, and the groups whose omission, one after the other, brings the adapter closest."""
        left, chosen, others = begin, list[_Cause](), list(groups)
        while others and left > self.right and len(chosen) < _MOST_GROUPS:
            tried = [self.distance(_together([*chosen, group])) for group in others]
            if min(tried) > _CLEARLY * left:
                break
            left = min(tried)
            chosen.append(others.pop(tried.index(left)))
        return left, chosen


def _groupings(modules: Sequence[str]) -> Iterator[list[_Cause]]:
    # Coarse groups first: they take fewer passes, and say more.
    yield _by(modules, _projection_of, "`{}` of all layers")
    layers = _by(modules, _layer_of, "layer {}")
    yield layers
    yield [_Cause(f"the last {at} layers", _together(layers[-at:])) for at in range(2, len(layers))]
    yield _by(modules, str, "`{}`")


def _whole(model: ByPeft) -> Iterator[_Cause]:
    """Yield scalings of the whole adapter by a wrong configuration."""
    for factor, text in ((2.0, "alpha were doubled"), (0.5, "alpha were halved"), (-1.0, "alpha had the other sign")):
        yield _Cause(text, dict.fromkeys(model.modules, factor))
    roots = {name: math.sqrt(model.rank_of(name)) for name in model.modules}
    yield _Cause("the whole adapter were missing", dict.fromkeys(model.modules, 0.0))
    yield _Cause("use_rslora were false, and it was trained with true", {name: 1 / one for name, one in roots.items()})
    yield _Cause("use_rslora were true, and it was trained with false", roots)


def _by(modules: Sequence[str], key: Callable[[str], str], text: str) -> list[_Cause]:
    """Return groups of modules with the same key; modules without a key are in no group."""
    groups: dict[str, dict[str, float]] = {}
    for name in modules:
        groups.setdefault(key(name), {})[name] = 0.0
    return [_Cause(text.format(one), group) for one, group in groups.items() if one]


def _layer_of(module: str) -> str:
    found = re.search(r"\.(\d+)\.", module)
    return found[1] if found else ""


def _projection_of(module: str) -> str:
    return module.rpartition(".")[2]


def _together(causes: Iterable[_Cause]) -> dict[str, float]:
    return {name: factor for cause in causes for name, factor in cause.factors.items()}


def _named(causes: Iterable[_Cause]) -> str:
    return ", ".join(cause.text for cause in causes)
