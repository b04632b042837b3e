"""Trained tokens (`trainable_token_indices`) in a worker: hooks of the model that replace rows by those of each slot.

At start, `TrainedTokens` makes the tables of all slots (`token_rows.py`), and hooks the embedding and the layer of
logits. The loading thread asks `writes` for an adapter's rows, which are written with the adapter's slot. In each step
the engine loop names the running requests (`begin_batch`), and the hooks replace their rows.

The hooks are on the layers that the model calls, with LoRA or without: vLLM adapts the embedding and the head in few
models. Each worker has the rows whole, so that nothing is exchanged between workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from lora_plugins.adapter.model_modules import ModelModules, TokenPlaces
from lora_plugins.adapter.trained_token_places import token_rows
from lora_plugins.worker.adapter_checks import require_finite
from lora_plugins.worker.beside import ReadBeside
from lora_plugins.worker.loaded_adapter import SlotWrite
from lora_plugins.worker.token_layers import base_of, find
from lora_plugins.worker.token_rows import TokenRows


class TrainedTokens:
    """Replaces rows of a model's embedding, and logits of its head, by the table of each row's slot.

    Attributes:
        places: where; None where no row is ever replaced, for the reason `why_not`.

    Args:
        manager: vLLM's `LoRAModelManager`, which has wrapped the model's layers.
        vllm_config: the engine's.

    Touches:
        vllm.model_executor.layers.logits_processor:
            LogitsProcessor._get_logits(self, hidden_states, lm_head, embedding_bias, skip_gather)
        vllm.lora.punica_wrapper.punica_base: PunicaWrapperBase{_token_lora_indices, _sampler_indices}
        vllm.config.model: ModelConfig{dtype}
    Why: vLLM has no trained tokens.
    Until: vLLM serves `trainable_token_indices` (vllm-project/vllm#55796).
    """

    def __init__(self, manager: Any, vllm_config: Any) -> None:
        self.places: TokenPlaces | None = None
        self.why_not = ""
        self._tables: tuple[TokenRows, ...] = ()  # of the embedding and the head; none where rows are never replaced
        self._in_batch: list[int] = []
        found = find(manager, vllm_config)
        if isinstance(found, str):
            self.why_not = found
            return
        self.places, embedding, processor, self._punica = found
        self._is_on_cpu = torch.device(manager.device).type == "cpu"
        dtype = vllm_config.model_config.dtype
        self._tables = tuple(TokenRows(manager.lora_slots, self.places, dtype, manager.device) for _ in range(2))
        self._scale = float(getattr(base_of(embedding), "embed_scale", 1))
        embedding.register_forward_hook(self._replace)
        if processor is not None:
            processor._get_logits = partial(self._with_logits, processor._get_logits)  # noqa: SLF001 - see "Touches"

    # --- in the engine loop ---

    def begin_batch(self, requests: Iterable[Any], owners: Sequence[int | None]) -> None:
        """Note which slots with tables the batch of these requests has; `owners` are engine ids by slot."""
        used = {slot for table in self._tables for slot in tuple(table.counts)}
        ids = {request.lora_int_id for request in requests if request} if used else set()
        self._in_batch = [slot for slot in used if owners[slot] in ids]

    def clear(self, slot: int) -> None:
        for table in self._tables:
            table.clear(slot)

    def empty(self) -> None:
        """Empty the tables of all slots, whatever the device's memory holds."""
        for table in self._tables:
            table.empty()

    def _replace(self, _: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        # On GPUs the search is part of the graph, which is made once, and for all batches.
        if self._is_on_cpu and not self._in_batch:
            return embedded
        ids = args[0].reshape(-1)
        slots = self._punica._token_lora_indices[: ids.shape[0]]  # noqa: SLF001 - of the whole buffer, as in a graph
        return self._tables[0].replaced(embedded.view(-1, embedded.shape[-1]), ids, slots).view(embedded.shape)

    def _with_logits(self, original: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = original(hidden, *args, **kwargs)
        # Of several workers, one may get the logits.
        for slot in self._in_batch if logits is not None else ():
            # Of rows of prompts too: see `PromptRows`.
            self._tables[1].write_logits(logits, hidden, self._punica._sampler_indices[: len(hidden)], slot)  # noqa: SLF001
        return logits

    # --- in the background ---

    def writes(self, read: ReadBeside | None, modules: ModelModules, *, check_finite: bool) -> list[SlotWrite]:
        """Return the writes of a slot's tables, for an adapter with or without tensors beside A and B.

        Raises:
            IncompatibleAdapter: as `token_rows`. InvalidAdapter: rows that are not finite.
        """
        writes: list[SlotWrite] = [(table.clear, ()) for table in self._tables]
        if read is None:
            return writes
        found = token_rows(read.beside, read.config, modules, read.module)
        if not writes:  # this model has no tables, and `token_rows` has refused trained tokens
            return writes
        scales = self._scale, 1.0  # the embedding's rows are replaced after its layer has scaled them
        for number, (table, one, scale) in enumerate(zip(self._tables, found, scales, strict=True)):
            if one is None:
                continue
            ids, order = torch.sort(torch.tensor(read.config.tokens_of(one.module)))
            rows = read.tensor(one)[order].to(table.rows.dtype)
            if check_finite:
                require_finite(rows, one.tensor.name)
            writes[number] = table.write, (ids, rows * scale)
        return writes
