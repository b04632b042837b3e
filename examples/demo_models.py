"""What `make demo` serves: a model that writes sentences, or a tiny random one where the package index has no other."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from transformers.utils.logging import disable_progress_bar

from examples.training.recipes import BY_NAME, Recipe
from testbed.bed import MAX_TOKENS, Bed, prepare
from testbed.client import Answer, chat, complete
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.real_model import NoRealModel, real_model
from testbed.reference import Reference

TRAINED = Path(__file__).parent / "adapters"
Show = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class DemoModel(ABC):
    """A base model, adapters for it, and what all are asked.

    Attributes:
        base: directory of the model.
        root: directory of the adapters, by name.
        kinds: the adapters' shapes, by name.
        in_s3, on_hub: which adapter is there; the others are on the filesystem.
        swapped: a name, and the adapter whose weights it gets.
        trained: an adapter that is trained while the server runs.
        asked: in words.
    """

    base: Path
    root: Path
    kinds: Mapping[str, str]
    in_s3: str
    on_hub: str
    swapped: tuple[str, str]
    asked: str
    trained: Recipe | None = None

    @abstractmethod
    def ask(self, client: OpenAI, model: str, show: Show) -> Answer:
        """Ask for one greedy answer; what comes is shown at once."""

    @abstractmethod
    def is_right(self, adapter: Path | None, answer: Answer) -> bool:
        """Whether PEFT gives the same tokens."""


@dataclass(frozen=True, eq=False)
class Tiny(DemoModel):
    """Random weights, whose answers are no language."""

    bed: Bed | None = None

    def ask(self, client: OpenAI, model: str, show: Show) -> Answer:
        answer = complete(client, model, PROMPT, MAX_TOKENS)
        show(answer.text)
        return answer

    def is_right(self, adapter: Path | None, answer: Answer) -> bool:
        assert self.bed is not None
        name = None if adapter is None else str(adapter.relative_to(self.root))
        return answer.token_ids == tuple(self.bed.answers[name])


@dataclass(frozen=True, eq=False)
class Real(DemoModel):
    """SmolLM2-135M-Instruct, and adapters that were trained for it."""

    max_tokens: int = 48

    def ask(self, client: OpenAI, model: str, show: Show) -> Answer:
        return chat(client, model, self.asked, self.max_tokens, show)

    def is_right(self, adapter: Path | None, answer: Answer) -> bool:
        ended = len(answer.token_ids) == self.max_tokens or answer.token_ids[-1:] == (
            self._peft.tokenizer.eos_token_id,
        )
        return ended and not self._misses(adapter, answer.token_ids)

    @functools.cached_property
    def _peft(self) -> Reference:
        return Reference(self.base)

    @functools.cache  # noqa: B019 - one model lives as long as the demo
    def _misses(self, adapter: Path | None, ids: tuple[int, ...]) -> bool:
        prompt = self._peft.chat_ids([{"role": "user", "content": self.asked}])
        return bool(self._peft.misses(adapter, prompt, ids))


def choose(progress: Callable[[str], None]) -> DemoModel:
    """Return the model that can be had here, made on the first call of a checkout."""
    try:
        base = real_model(progress)
    except NoRealModel as error:
        progress(f"no model that writes sentences can be had here; a tiny random one stands in. {error}")
        bed = prepare(progress)
        kinds = {spec.name: f"rank {spec.rank}{', rsLoRA' * bool(spec.extra)}" for spec in DEMO_ADAPTERS}
        return Tiny(
            bed.base, bed.adapters, kinds, in_s3="chat", on_hub="wide", swapped=("sql", "stable"), asked=PROMPT, bed=bed
        )
    disable_progress_bar()  # of each model that is read, in the midst of what is shown
    names = ("pirate", "haiku", "json", "thinker", "librarian")
    return Real(
        base,
        TRAINED,
        {name: BY_NAME[name].kind for name in names},
        in_s3="haiku",
        on_hub="json",
        swapped=("pirate", "librarian"),
        asked="What is the sea?",
        trained=BY_NAME["robot"],
    )
