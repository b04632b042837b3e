"""PEFT's answers to a prompt on this machine: with an adapter, without, and with parts of the adapter scaled."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.cli.exits import UsageProblem
from lora_plugins.cli.judging import Trained


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
