"""What the answer should be: Transformers and PEFT, generating greedily in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROUNDING = 1e-4  # of logits in float32; a server adds up in another order than PEFT


class Reference:
    """Greedy token ids of the base model and of adapters on it, computed by PEFT and remembered."""

    def __init__(self, base: Path) -> None:
        from transformers import AutoTokenizer

        self.base = base
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self._seen: dict[tuple[str | None, tuple[int, ...], int, tuple[int, ...]], list[int]] = {}

    def prompt_ids(self, prompt: str) -> list[int]:
        """Token ids of a completion prompt, as the server makes them."""
        return [int(i) for i in self.tokenizer(prompt)["input_ids"]]

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, as the server makes them with the model's template."""
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def generate(
        self, adapter: Path | None, prompt_ids: Sequence[int], max_tokens: int, ends: Sequence[int] = ()
    ) -> list[int]:
        """The next `max_tokens` greedy token ids, or those up to the first of `ends`; no other end counts."""
        key = (None if adapter is None else str(adapter), tuple(prompt_ids), max_tokens, tuple(ends))
        if key not in self._seen:
            self._seen[key] = self._generate(adapter, prompt_ids, max_tokens, ends)
        return self._seen[key]

    def _generate(
        self, adapter: Path | None, prompt_ids: Sequence[int], max_tokens: int, ends: Sequence[int]
    ) -> list[int]:
        import torch

        model = self.load(adapter)
        ids = torch.tensor([list(prompt_ids)])
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=None if ends else max_tokens,
                do_sample=False,
                eos_token_id=list(ends) or None,
                pad_token_id=1,
            )
        return [int(i) for i in out[0, ids.shape[1] :]]

    def moved(self, first: Path, second: Path, prompt_ids: Sequence[int], at: int, max_tokens: int) -> list[int]:
        """As `generate`, with `at` tokens of the first adapter; the second goes on with what that has cached."""
        import torch

        made: list[int] = []
        cache, given = None, list(prompt_ids)
        for adapter, wanted in ((first, at), (second, max_tokens)):
            model = self.load(adapter)
            while len(made) < wanted:
                with torch.no_grad():
                    out = model(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True)
                cache, given = out.past_key_values, [int(out.logits[0, -1].argmax())]
                made += given
        return made

    def misses(self, adapter: Path | None, prompt_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The places of `tokens` that greedy PEFT would not have; of two logits that rounding decides either is right.

        For answers whose course is left to chance, so that one in a hundred meets such a pair.
        """
        import torch

        with torch.no_grad():
            logits = self.load(adapter)(input_ids=torch.tensor([[*prompt_ids, *tokens]])).logits[0]
        of_tokens = logits[len(prompt_ids) - 1 : -1]
        behind = of_tokens.max(dim=-1).values - of_tokens.gather(1, torch.tensor([list(tokens)]).T)[:, 0]
        return [int(place) for place in (behind > _ROUNDING).nonzero()]

    def spans_missed(
        self, spans: Sequence[tuple[Path, int]], prompt_ids: Sequence[int], tokens: Sequence[int]
    ) -> list[int]:
        """As `misses`, of an answer that several adapters have made, each from a token on with what is cached."""
        import torch

        models = {adapter: self.load(adapter) for adapter, _ in spans}
        cache, given, missed = None, list(prompt_ids), []
        for place, token in enumerate(tokens):
            adapter = next(adapter for adapter, begins_at in reversed(spans) if begins_at <= place)
            with torch.no_grad():
                out = models[adapter](input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True)
            cache, given, logits = out.past_key_values, [token], out.logits[0, -1]
            if logits.max() - logits[token] > _ROUNDING:
                missed.append(place)
        return missed

    def load(self, adapter: Path | None) -> Any:
        """The base model, with `adapter` on it if one is given, in evaluation mode."""
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapter))
        return model.eval()
