"""Our CPU kernels behind vLLM's punica interface: the class whose methods compute LoRA for all layers of a worker.

vLLM makes one wrapper in each worker, and each layer registers once at start. vLLM then calls `update_metadata` for
each batch whose adapters change, and `add_...` from each layer in every step, all in the engine loop. The methods
change `y` in place.

Source of the interface: `PunicaWrapperBase` in vllm/lora/punica_wrapper/punica_base.py, 0.30 to 0.33. Rows without an
adapter stay unchanged on every path, unlike in vLLM before 0.33 (vllm-project/vllm#48421). Methods that are not
overridden here stay vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from lora_plugins.errors import InvalidSettings
from lora_plugins.kernels import cpu, layers, packing, reference
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.compiled.library import Product
from lora_plugins.kernels.compiled.panels import SlotPanels
from lora_plugins.kernels.slot_ranks import SlotRanks
from lora_plugins.log import logger


class CompiledPunicaWrapperCPU(PunicaWrapperCPU):  # type: ignore[misc]
    """Groups rows by adapter once per batch; the work follows each adapter's own rank.

    `x` is `[rows, in]` and `y` `[rows, out]`, both perhaps with leading dimensions; stacks are as in
    `lora_plugins.kernels.reference`. float32, bfloat16 and float16.

    Touches:
        vllm.lora.punica_wrapper.punica_cpu:
            PunicaWrapperCPU{add_shrink, add_expand, add_lora_embedding,
                add_lora_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer, **kwargs),
                add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, buffer, **kwargs)}
        vllm.lora.punica_wrapper.punica_base: PunicaWrapperBase{update_metadata, token_lora_indices, sampler_indices}
    Why: vLLM's work follows max_lora_rank, and before 0.33 base rows get an adapter (vllm-project/vllm#48421).
    Until: vLLM's CPU kernels group rows and know true ranks.
    """

    computes_vectors = True  # `worker/vectors.py`
    is_compiled = True  # False: layers are registered, and no compiled product computes them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers = cpu.Buffers()
        # By `id` of the stacks of A, of an embedding by `id` of the stack of B.
        self._modules: dict[int, cpu.ModuleSlots] = {}
        self._plans: dict[int, cpu.ModulePlan] = {}
        self._logits_plans: dict[int, cpu.ModulePlan] = {}
        self._batch = self._logits_batch = cpu.BatchRows(torch.empty(0, dtype=torch.int64))
        self._logged: set[str] = set()

    def register(self, module: Any) -> None:
        """Prepare for a layer that will call this wrapper.

        `set_mapping` of the layer calls `register`, after the layer's weights were created.

        Raises:
            InvalidSettings: the product cannot be compiled for the layer's dtype.
        """
        if self.is_compiled:
            packing.give_packer(module, _product)
        layer = layers.watch(module)
        if layer is None:
            self._log_once(type(module).__name__, "is computed by vLLM's own path")
            return
        a, b, ranks = layer
        # Fully sharded layers divide the rank of one side, and are computed side by side, without a plan.
        if all(a_i.ndim == 4 and a_i.shape[2] == b_i.shape[3] for a_i, b_i in zip(a, b, strict=True)):
            slots = cpu.ModuleSlots(*layer, self._panels(module, layer))
            # A classification head hands its only pair to add_lora_logits without the tuple, so both ids must find the
            # slots.
            keys = {id(module.lora_a_stacked), *((id(a[0]),) if len(a) == 1 else ())}
            self._modules.update(dict.fromkeys(keys, slots))
            ranks.listen(functools.partial(self._drop_plans, keys))
        elif a[0].ndim == 3:
            # Three axes: an embedding looks A up itself, and asks for B only.
            self._modules[id(module.lora_b_stacked)] = cpu.ModuleSlots(*layer)
        else:
            self._log_once(type(module).__name__, "is computed adapter by adapter at the slot's full rank")

    def _panels(self, module: Any, layer: layers.WatchedLayer) -> SlotPanels | None:
        """Return the module's panels, or None where PyTorch computes the module."""
        packer = packing.packer_of(module)
        if packer is not None:
            return packer.panels
        dtype = str(layer.a[0].dtype).removeprefix("torch.")
        if not self.is_compiled:
            return None
        if dtype not in build.ELEMENTS:
            self._log_once(f"a layer of {dtype}", "is computed by PyTorch's products")
            return None
        return SlotPanels(_product(dtype), *layer)

    def _drop_plans(self, keys: Collection[int], slot: int) -> None:
        """Drop the stale plans of a written module: a plan must not keep the adapter that the slot pointed at."""
        for key in keys:
            self._plans.pop(key, None)
            self._logits_plans.pop(key, None)

    def update_metadata(self, mapping: Any, *args: Any, **kwargs: Any) -> None:
        """Group the rows of the next batch; vLLM calls this method when the rows' adapters change."""
        super().update_metadata(mapping, *args, **kwargs)
        # Plans hold row numbers of the old batch, so both plans go below.
        self._batch = cpu.BatchRows(self.token_lora_indices)
        self._logits_batch = cpu.BatchRows(self.sampler_indices)
        self._plans.clear()
        self._logits_plans.clear()

    def add_lora_linear(
        self,
        y: Any,
        x: Any,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        scale: float,
        output_slices: Sequence[int],
        *,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compute `y += scale * B A x` in place, each row with its own adapter."""
        # Between two layers the base product empties the caches, so `repeat` comes first, and touches little memory.
        # Without `add_inputs` rows of `y` have to become zeros first.
        plan = self._plans.get(id(lora_a_stacked)) if add_inputs else None
        if plan is not None and plan.is_for(scale) and plan.alone is not None and plan.alone.repeat(y, x):
            return
        if not self._batch.rows:  # all rows are the base model's
            return
        plan = self._plan(self._plans, self._batch, lora_a_stacked, lora_b_stacked, scale)
        if y.ndim != 2 or x.ndim != 2:
            y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        if plan.steps and y.shape[0] > self._batch.n_rows:
            layers.refuse_more_rows(y.shape[0], self._batch.n_rows)
        if not add_inputs:
            self._adapted_rows_to_zero(y, sum(output_slices))
        # vLLM shows some layers the first rows only; the batch's plans are for all rows.
        if y.shape[0] < self._batch.n_rows:
            plan = cpu.ModulePlan(
                plan.module, cpu.BatchRows(self.token_lora_indices[: y.shape[0]]), self._buffers, scale
            )
        plan.run(y, x)

    def add_lora_logits(
        self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, **kwargs: Any
    ) -> None:
        """Compute `y += scale * B A x` in place, with the adapter of each sampled row."""
        if not self._logits_batch.rows:
            return
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        plan = self._plan(self._logits_plans, self._logits_batch, lora_a_stacked, lora_b_stacked, scale)
        if not plan.turns:
            plan.run(y, x)
            return
        # Logits may be wider than B, or of another dtype: `y` is multiplied by g here, and the plan computes
        # `g * B A x + c` apart.
        added = torch.zeros(y.shape[0], plan.width, dtype=plan.dtype)
        plan.run(added, x)
        width = min(plan.width, y.shape[1])
        for slot, rows in self._logits_batch.rows.items():
            vectors = plan.module.ranks.vectors.get(slot)
            own = y[rows, :width] if vectors is None else y[rows, :width] * vectors.g[:width]
            y[rows, :width] = (own + added[rows, :width]).to(y.dtype)

    def add_lora_embedding(self, y: Any, x: Any, lora_b_stacked: Any, add_inputs: bool = True, **kwargs: Any) -> None:
        """Compute `y += B x` in place, where `x` `[rows, max_rank]` is the layer's look-up in A."""
        known = self._modules.get(id(lora_b_stacked))
        ranks = None if known is None else known.ranks
        y, width = y.view(-1, y.shape[-1]), int(lora_b_stacked.shape[2])
        if not add_inputs:
            self._adapted_rows_to_zero(y, width)
        for slot, rows in self._rows(y.shape[0]):
            rank = lora_b_stacked.shape[3] if ranks is None else ranks[slot][0]
            if rank:  # few adapters adapt an embedding: the others have rank 0
                cpu.add_expanded(y, x, lora_b_stacked[slot, 0], rows, rank, first=0, width=width)
            if ranks is not None and (vectors := ranks.vectors.get(slot)) is not None:
                cpu.turn(rows, vectors, y)

    def add_shrink(self, y: Any, x: Any, lora_a_stacked: Sequence[Any], scale: float, **kwargs: Any) -> None:
        """Compute `y[i] = scale * A_i x` in place, for layers that gather between shrink and expand (fully sharded)."""
        x = x.reshape(-1, x.shape[-1])
        if self._batch.rows:
            layers.refuse_more_rows(x.shape[0], self._batch.n_rows)
        for y_i, a_i in zip(y, lora_a_stacked, strict=True):
            into = y_i.view(-1, y_i.shape[-1])
            for slot, rows in self._rows(into.shape[0]):
                # The full rank of the slot: a fully sharded worker holds a part of the rank, and vLLM pads with zeros.
                cpu.shrink_rows(into, x, a_i[slot, 0], rows, min(a_i.shape[2], into.shape[1]), scale)

    def add_expand(
        self,
        y: Any,
        x: Any,
        lora_b_stacked: Sequence[Any],
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compute `y[:, slice i] += B_i x[i]` in place, for fully sharded layers, which gather before the expand."""
        y = y.view(-1, y.shape[-1])
        if not add_inputs:
            # Rows of the base model keep their value even without `add_inputs`.
            self._adapted_rows_to_zero(y[:, offset_start:], sum(output_slices))
        for x_i, b_i, width in zip(x, lora_b_stacked, output_slices, strict=True):
            for slot, rows in self._rows(y.shape[0]):
                cpu.add_expanded(y, x_i, b_i[slot, 0], rows, b_i.shape[3], offset_start, width)
            offset_start += width

    def _plan(
        self, plans: dict[int, cpu.ModulePlan], batch: cpu.BatchRows, a: Any, b: Any, scale: float
    ) -> cpu.ModulePlan:
        """Return the module's plan for this batch; a write of the module's slots makes a new plan."""
        plan = plans.get(id(a))
        if plan is None or not plan.is_for(scale):
            plan = plans[id(a)] = cpu.ModulePlan(self._module(a, b), batch, self._buffers, scale)
        return plan

    def _module(self, lora_a_stacked: Any, lora_b_stacked: Any) -> cpu.ModuleSlots:
        known = self._modules.get(id(lora_a_stacked))
        a, b = (part if isinstance(part, tuple | list) else (part,) for part in (lora_a_stacked, lora_b_stacked))
        # Identity, not the id alone: vLLM may free a layer's stacks, and a new tensor may get the old id.
        if known is not None and all(mine is theirs for mine, theirs in zip(known.a, a, strict=True)):
            return known
        # An unregistered layer: the full rank is right at any true rank, because vLLM pads with zeros.
        self._log_once(f"a layer with slots {tuple(a[0].shape)}", "is computed at its slots' full rank")
        return cpu.ModuleSlots(tuple(a), tuple(b), SlotRanks(a[0].shape[0], [int(b_i.shape[3]) for b_i in b]))

    def _rows(self, n_rows: int) -> Iterator[tuple[int, Any]]:
        """Yield the slots in use, each with the index of its rows among the first `n_rows`."""
        for slot, rows in self._batch.rows.items():
            yield slot, rows if n_rows >= self._batch.n_rows else rows[rows < n_rows]

    def _adapted_rows_to_zero(self, y: Any, width: int) -> None:
        for _, rows in self._rows(y.shape[0]):
            y[:, :width].index_fill_(0, rows, 0)

    def _log_once(self, what: str, how: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.info("CPU kernels: %s %s", what, how)


def _product(dtype: str) -> Product:
    try:
        return build.product(dtype)
    except build.CannotCompile as error:
        raise InvalidSettings(
            f"there are no compiled LoRA kernels for {dtype} here: {error}",
            expected="a compiler and a processor for it",
            remedy="set LORA_PLUGINS_KERNELS=vllm",
        ) from error


class ReferencePunicaWrapper(CompiledPunicaWrapperCPU):
    """The reference in the engine, row by row: slow; shows which side of a difference is wrong."""

    is_compiled = False

    def add_lora_linear(
        self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, output_slices: Any, **kwargs: Any
    ) -> None:
        slots = self._module(lora_a_stacked, lora_b_stacked)
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        if self._batch.rows:
            layers.refuse_more_rows(y.shape[0], self._batch.n_rows)
        reference.lora_linear(
            y, x, slots.a, slots.b, self.token_lora_indices.tolist(), slots.ranks, output_slices, scale=scale,
            add_inputs=kwargs.get("add_inputs", True), vectors=slots.ranks.vectors,
        )  # fmt: skip
