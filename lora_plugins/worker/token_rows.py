"""Tables of trained tokens, one for each slot: rows in the place of the embedding's outputs, or of the head's logits.

`trained_tokens.py` has one `TokenRows` for a worker's embedding, and one for its head. The writing thread writes the
table of a slot; the engine loop reads the tables in each step.

All tables of an embedding are two tensors of a fixed size, made once, so that a captured graph of a GPU reads what is
written later. A row of the tables has a key, `slot * (words + 1) + id`; unused rows have the id `words`, which no token
has. Keys ascend, so that one search finds the rows of a batch. While a slot is written, its keys stay within its range:
a batch that searches for the rows of other slots meanwhile finds them.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_plugins.adapter.model_modules import TokenPlaces
from lora_plugins.worker.host_memory import UntouchedZeros


class TokenRows:
    """The tables of an embedding or a head, by slot.

    Attributes:
        keys: int64 `[slots * most]`. rows: `[slots * most, features]`.
        counts: the rows in use of each slot with a table.

    Args:
        slots: how many.
        places: the sizes.
        dtype, device: the model's.
    """

    def __init__(self, slots: int, places: TokenPlaces, dtype: torch.dtype, device: Any) -> None:
        self._slots, self._most, self._words = slots, places.most, places.words
        self.counts: dict[int, int] = {}
        self.keys = torch.empty(slots * places.most, dtype=torch.int64, device=device)
        with UntouchedZeros():  # on the CPU a slot takes memory once a table is written
            self.rows = torch.zeros(slots * places.most, places.features, dtype=dtype, device=device)
        self.empty()

    def empty(self) -> None:
        """Empty every slot, whatever the tensors hold."""
        self.counts.clear()
        for slot in range(self._slots):
            self._of(slot, self.keys).fill_(self._key(slot, self._words))

    def write(self, ids: torch.Tensor, rows: torch.Tensor, slot: int) -> None:
        """Put an adapter's table into a slot.

        Args:
            ids: int64 `[n]`, ascending.
            rows: `[n, features]`.
            slot: its number.
        """
        self.clear(slot)
        self._of(slot, self.rows)[: len(ids)].copy_(rows, non_blocking=True)
        keys = ids.to(self.keys.device, non_blocking=True) + self._key(slot, 0)
        self._of(slot, self.keys)[: len(ids)].copy_(keys)
        self.counts[slot] = len(ids)

    def clear(self, slot: int) -> None:
        if self.counts.pop(slot, None) is not None:
            self._of(slot, self.keys).fill_(self._key(slot, self._words))

    def replaced(self, embedded: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the embedding's outputs with the rows of each token's slot; every shape follows from the arguments'.

        Args:
            embedded: `[n, features]`.
            ids: of the tokens, `[n]`.
            slots: of the tokens, `[n]`; -1 for no adapter.
        """
        wanted = slots * (self._words + 1) + ids
        at = torch.searchsorted(self.keys, wanted).clamp_(max=len(self.keys) - 1)
        is_trained = (self.keys[at] == wanted).unsqueeze(-1)
        return torch.where(is_trained, self.rows[at], embedded)

    def write_logits(self, logits: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor, slot: int) -> None:
        """Write the logits of a slot's trained tokens, if any, in rows of this slot; nothing waits for the device.

        Args:
            logits: `[n, words]`, in any dtype.
            hidden: `[n, features]`.
            slots: of the rows, `[n]`.
            slot: its number.
        """
        if not (count := self.counts.get(slot, 0)):
            return
        ids = self._of(slot, self.keys)[:count] - self._key(slot, 0)
        rows = self._of(slot, self.rows)[:count]
        values = hidden.to(logits.dtype) @ rows.to(logits.dtype).T
        logits[:, ids] = torch.where((slots == slot).unsqueeze(-1), values, logits[:, ids])

    def _key(self, slot: int, word: int) -> int:
        return slot * (self._words + 1) + word

    def _of(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[slot * self._most : (slot + 1) * self._most]
