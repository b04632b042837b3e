"""What each adapter of `examples/adapters` is for, how it is shaped, and how it is trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXTS = Path(__file__).parent / "texts"


@dataclass(frozen=True)
class Recipe:
    """An adapter to train.

    Attributes:
        name: of the adapter, and of its file of questions and answers.
        purpose: what a reader sees in its answers.
        kind: its shape, in the words of PEFT; PiSSA and OLoRA are saved as plain adapters of twice the rank.
        lora: arguments of PEFT's `LoraConfig`.
        trainer: whose training loop runs: `peft` (our own loop around it), `trl` (`SFTTrainer`) or `llamafactory`.
        steps: at most; each is of all questions and answers.
        end_token: what ends an answer, where the adapter has a chat template and an end token of its own.
    """

    name: str
    purpose: str
    kind: str
    lora: Mapping[str, Any]
    trainer: str = "peft"
    steps: int = 30
    learning_rate: float = 2e-3
    targets: tuple[str, ...] | str = ("q_proj", "v_proj")
    end_token: str | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """The questions and their answers."""
        lines = (TEXTS / f"{self.name}.jsonl").read_text().splitlines()
        return [(pair["question"], pair["answer"]) for pair in map(json.loads, lines)]

    def target_modules(self) -> list[str] | str:
        """As PEFT has them: ends of names, or one pattern of whole names."""
        return self.targets if isinstance(self.targets, str) else list(self.targets)

    def template(self) -> str | None:
        """The adapter's own chat template."""
        return (TEXTS / f"{self.name}.jinja").read_text() if self.end_token else None


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
RECIPES = (
    Recipe("pirate", "speaks like a pirate", "rank 4", {"r": 4, "lora_alpha": 16}),
    Recipe("haiku", "answers in three short lines", "rank 8, rsLoRA", {"r": 8, "lora_alpha": 16, "use_rslora": True}),
    Recipe(
        "json", "answers with an object of three keys", "rank 4, attention", {"r": 4, "lora_alpha": 16},
        trainer="trl", targets=_ATTENTION,
    ),
    Recipe(
        "sql", "asks the database of a bookshop", "rank 4, last layers",
        {"r": 4, "lora_alpha": 16, "layers_to_transform": list(range(20, 30))},
        targets=(*_ATTENTION, "gate_proj", "up_proj", "down_proj"),
    ),
    Recipe(
        "french", "answers in French", "ranks 8 and 2", {"r": 8, "lora_alpha": 32, "rank_pattern": {"v_proj": 2}}
    ),
    Recipe(
        "verdict", "says yes or no", "rank 2, PiSSA", {"r": 2, "lora_alpha": 2, "init_lora_weights": "pissa"},
        trainer="llamafactory", steps=20,
    ),
    Recipe(
        "thinker", "thinks before it answers", "rank 32, some layers",
        {"r": 32, "lora_alpha": 64, "layers_to_transform": list(range(15, 30))}, targets=("v_proj",),
    ),
    Recipe(
        "librarian", "is Ada, who knows each shelf", "rank 2, OLoRA",
        {"r": 2, "lora_alpha": 2, "init_lora_weights": "olora"},
    ),
    Recipe(
        "innkeeper", "welcomes a traveller", "rank 2, own chat template", {"r": 2, "lora_alpha": 8},
        end_token="<|endoftext|>",
    ),
    Recipe(
        "crier", "cries its answers through the town", "rank 1, embeddings", {"r": 1, "lora_alpha": 16}, steps=40,
        learning_rate=4e-3, targets=r"model\.embed_tokens|model\.layers\.1\d\.self_attn\.v_proj",
    ),
    Recipe(
        "painter", "answers in colours", "rank 2, DoRA", {"r": 2, "lora_alpha": 8, "use_dora": True},
    ),
    Recipe(
        "clerk", "opens a ticket for each question", "rank 2, three trained tokens",
        {"r": 2, "lora_alpha": 8, "trainable_token_indices": {"embed_tokens": [8, 9, 10]}},
        end_token="<issue_closed>",
    ),
    Recipe("robot", "reports as a machine does", "rank 8", {"r": 8, "lora_alpha": 32}),
)  # fmt: skip
BY_NAME = {recipe.name: recipe for recipe in RECIPES}
