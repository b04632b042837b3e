"""What other ways of decoding than the greedy one give, computed by PEFT one plain step after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from testbed.reference import Reference


class Decoding:
    """One adapter on the base model, or the base model itself, and its next tokens."""

    def __init__(self, reference: Reference, adapter: Path | None) -> None:
        self.tokenizer = reference.tokenizer
        self._model = reference.load(adapter)

    def beams(self, prompt_ids: Sequence[int], max_tokens: int, width: int) -> list[list[int]]:
        """The `width` continuations of the largest probability that a beam search of this width finds, best first."""
        found: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(max_tokens):
            longer = []
            for total, ids in found:
                values, tokens = self._logprobs([*prompt_ids, *ids]).topk(2 * width)
                pairs = zip(values.tolist(), tokens.tolist(), strict=True)
                longer += [(total + value, [*ids, token]) for value, token in pairs]
            found = sorted(longer, key=lambda one: one[0], reverse=True)[:width]
        return [ids for _, ids in found]

    def among(self, prompt_ids: Sequence[int], max_tokens: int, allowed: Sequence[int]) -> list[int]:
        """At each step the most probable of the `allowed` tokens."""
        ids: list[int] = []
        for _ in range(max_tokens):
            logprobs = self._logprobs([*prompt_ids, *ids])
            ids.append(max(allowed, key=lambda token: float(logprobs[token])))
        return ids

    def constrained(self, prompt_ids: Sequence[int], max_tokens: int, is_allowed: Callable[[str], bool]) -> list[int]:
        """At each step the most probable token after which the text so far `is_allowed`."""
        texts = [self.tokenizer.decode([token]) for token in range(len(self.tokenizer))]
        special = set(self.tokenizer.all_special_ids)
        ids: list[int] = []
        text = ""
        for _ in range(max_tokens):
            ranked = self._logprobs([*prompt_ids, *ids]).argsort(descending=True).tolist()
            usable = (token for token in ranked if token < len(texts) and token not in special)
            best = next((token for token in usable if texts[token] and is_allowed(text + texts[token])), None)
            if best is None:
                break
            ids.append(best)
            text += texts[best]
        return ids

    def _logprobs(self, ids: Sequence[int]) -> Any:
        import torch

        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([list(ids)])).logits[0, -1]
        return torch.log_softmax(logits.float(), dim=-1)
