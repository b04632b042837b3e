"""Our CPU kernels behind vLLM's punica interface.

Source of the interface: `PunicaWrapperBase` in vllm/lora/punica_wrapper/punica_base.py, 0.30 to 0.33. Rows of no
adapter stay as they are on every path, which vLLM before 0.33 does not ensure (vllm-project/vllm#48421). What is not
overridden here stays vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from lora_plugins.errors import InvalidSettings
from lora_plugins.kernels import cpu, crossover, layers, packing, reference
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.compiled.library import Product
from lora_plugins.kernels.compiled.panels import SlotPanels
from lora_plugins.kernels.packs import ModuleWeights
from lora_plugins.kernels.ranks import SlotRanks
from lora_plugins.kernels.segments import NONE, segment
from lora_plugins.ledger import Patch
from lora_plugins.log import logger


class GroupedPunicaWrapperCPU(PunicaWrapperCPU):  # type: ignore[misc]
    """Rows grouped by adapter once per batch; work follows each adapter's own rank.

    `x` is `[rows, in]` and `y` `[rows, out]`, both perhaps with leading dimensions; stacks are as in
    `lora_plugins.kernels.reference`. float32, bfloat16 and float16.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers = cpu.Buffers()
        self._modules: dict[int, ModuleWeights] = {}
        self._embeddings: dict[int, tuple[Any, SlotRanks]] = {}  # with the tensor, so that its id stays its own
        self._plans: dict[int, cpu.Plan] = {}
        self._logits_plans: dict[int, cpu.Plan] = {}
        self._slots: list[int] = []
        self._batch = self._logits_batch = cpu.Batch(NONE, self._buffers)
        self._rows_of: list[tuple[int, Any]] = []
        self._logged: set[str] = set()

    def register(self, module: Any) -> None:
        """Know a layer that will call this wrapper; called by `set_mapping`, after its weights were created."""
        layer = layers.watch(module)
        if layer is None:
            self._log_once(type(module).__name__, "is computed by vLLM's own path")
            return
        a, b, ranks = layer
        if all(a_i.ndim == 4 and a_i.shape[2] == b_i.shape[3] for a_i, b_i in zip(a, b, strict=True)):
            panels = self._panels(module, a, b, ranks)
            ranks.listen(functools.partial(self._drop_plans, (id(module.lora_a_stacked), id(a[0]))))
            by_torch = crossover.torch_from_rows(str(a[0].dtype).removeprefix("torch."))
            weights = self._modules[id(module.lora_a_stacked)] = ModuleWeights(a, b, ranks, panels, by_torch)
            module._lora_plugins_prepare = weights.prepare  # noqa: SLF001 - ours, for who fills slots in a background thread
            if isinstance(module.lora_a_stacked, tuple) and len(a) == 1:
                # A classification head hands its only pair to add_lora_logits without the tuple.
                self._modules[id(a[0])] = self._modules[id(module.lora_a_stacked)]
        elif a[0].ndim == 3:
            self._embeddings[id(module.lora_b_stacked)] = module.lora_b_stacked, ranks
        else:
            self._log_once(type(module).__name__, "is computed adapter by adapter at the slot's full rank")

    def _panels(self, module: Any, a: Sequence[Any], b: Sequence[Any], ranks: SlotRanks) -> SlotPanels | None:
        """None: this module's products are PyTorch's."""
        return None

    def _drop_plans(self, keys: Sequence[int], slot: int) -> None:
        """After a write of a module's slot its plans are old, and must not keep what the slot pointed at."""
        for key in keys:
            self._plans.pop(key, None)
            self._logits_plans.pop(key, None)

    @property
    def packed_bytes(self) -> int:
        """Memory of packs and buffers, beside vLLM's slots and the panels that belong to adapters."""
        distinct = {id(module): module for module in self._modules.values()}
        return self._buffers.nbytes + sum(module.packed_bytes for module in distinct.values())

    def update_metadata(self, mapping: Any, *args: Any, **kwargs: Any) -> None:
        """Group the rows of the next batch; called by vLLM when the rows' adapters change."""
        super().update_metadata(mapping, *args, **kwargs)
        self._slots = self.token_lora_indices.tolist()
        self._batch = self._batch_of(self._slots)
        self._logits_batch = self._batch_of(self.sampler_indices.tolist())
        self._rows_of = []
        self._plans.clear()
        self._logits_plans.clear()

    def _batch_of(self, slots: list[int]) -> cpu.Batch:
        return cpu.Batch(segment(slots), self._buffers)

    def add_lora_linear(
        self,
        y: Any,
        x: Any,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        scale: float,
        output_slices: Sequence[int],
        *,
        buffer: Any = None,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """`y += scale * B A x` in place, each row with its own adapter."""
        if not self._batch.segments.slots and add_inputs:
            return
        plan = self._plan(self._plans, self._batch, lora_a_stacked, lora_b_stacked, scale)
        if y.ndim != 2 or x.ndim != 2:
            y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        if not add_inputs:
            self._adapted_rows_to_zero(y, sum(output_slices))
        if y.shape[0] < self._batch.segments.n_rows:  # vLLM lets a layer see the first rows only
            batch = self._batch_of(self._slots[: y.shape[0]])
            plan = cpu.Plan(self._weights(lora_a_stacked, lora_b_stacked), batch, scale)
        plan.run(y, x)

    def add_lora_logits(
        self,
        y: Any,
        x: Any,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        scale: float,
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        """`y += scale * B A x` in place, with the adapter of each sampled row."""
        if not self._logits_batch.segments.slots:
            return
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        self._plan(self._logits_plans, self._logits_batch, lora_a_stacked, lora_b_stacked, scale).run(y, x)

    def add_lora_embedding(self, y: Any, x: Any, lora_b_stacked: Any, add_inputs: bool = True, **kwargs: Any) -> None:
        """`y += B x` in place, where `x` `[rows, max_rank]` is what the layer looked up in A."""
        _, ranks = self._embeddings.get(id(lora_b_stacked), (None, None))
        y, width = y.view(-1, y.shape[-1]), int(lora_b_stacked.shape[2])
        if not add_inputs:
            self._adapted_rows_to_zero(y, width)
        for slot, rows in self._rows(y.shape[0]):
            rank = lora_b_stacked.shape[3] if ranks is None else ranks[slot][0]
            if rank:  # few adapters hold an embedding
                cpu.add_expanded(y, x, lora_b_stacked[slot, 0], rows, rank, slice(0, width))

    def add_shrink(self, y: Any, x: Any, lora_a_stacked: Sequence[Any], scale: float, **kwargs: Any) -> None:
        """`y[i] = scale * A_i x` in place, for layers that gather between shrink and expand (fully sharded)."""
        x = x.reshape(-1, x.shape[-1])
        for y_i, a_i in zip(y, lora_a_stacked, strict=True):
            into = y_i.view(-1, y_i.shape[-1])
            for slot, rows in self._rows(into.shape[0]):
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
        """`y[:, slice i] += B_i x[i]` in place, for layers that gather between shrink and expand (fully sharded)."""
        y = y.view(-1, y.shape[-1])
        if not add_inputs:
            self._adapted_rows_to_zero(y[:, offset_start:], sum(output_slices))
        for x_i, b_i, width in zip(x, lora_b_stacked, output_slices, strict=True):
            columns = slice(offset_start, min(offset_start + width, y.shape[1]))
            for slot, rows in self._rows(y.shape[0]):
                cpu.add_expanded(y, x_i, b_i[slot, 0], rows, b_i.shape[3], columns)
            offset_start += width

    def _plan(self, plans: dict[int, cpu.Plan], batch: cpu.Batch, a: Any, b: Any, scale: float) -> cpu.Plan:
        """The module's plan for this batch, made again where its slots have been written since."""
        plan = plans.get(id(a))
        if plan is None or plan.version != plan.ranks.version or plan.scale != scale:
            plan = plans[id(a)] = cpu.Plan(self._weights(a, b), batch, scale)
        return plan

    def _weights(self, lora_a_stacked: Any, lora_b_stacked: Any) -> ModuleWeights:
        key = id(lora_a_stacked)
        weights = self._modules.get(key)
        a, b = (part if isinstance(part, tuple | list) else (part,) for part in (lora_a_stacked, lora_b_stacked))
        if weights is None or any(mine is not theirs for mine, theirs in zip(weights.a, a, strict=True)):
            # Of a layer that is not registered: right at any rank, since vLLM pads with zeros.
            self._log_once(f"a layer with slots {tuple(a[0].shape)}", "is computed at its slots' full rank")
            weights = ModuleWeights(a, b, _UnknownRanks(a[0].shape[0], [int(b_i.shape[3]) for b_i in b]))
        return weights

    def _rows(self, n_rows: int) -> list[tuple[int, Any]]:
        """Slots in use, each with the index of its rows among the first `n_rows`."""
        if not self._rows_of and self._batch.segments.slots:
            slots = torch.tensor(self._slots)
            self._rows_of = [(slot, (slots == slot).nonzero()[:, 0]) for slot in self._batch.segments.slots]
        if n_rows >= len(self._slots):
            return self._rows_of
        return [(slot, rows[rows < n_rows]) for slot, rows in self._rows_of]

    def _adapted_rows_to_zero(self, y: Any, width: int) -> None:
        for _, rows in self._rows(y.shape[0]):
            y[:, :width].index_fill_(0, rows, 0)

    def _log_once(self, what: str, how: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.info("CPU kernels: %s %s", what, how)


class CompiledPunicaWrapperCPU(GroupedPunicaWrapperCPU):
    """As the grouped one, with products by our C, compiled for this machine and the model's dtype."""

    def register(self, module: Any) -> None:
        packing.give_packer(module, _product)
        super().register(module)

    def _panels(self, module: Any, a: Sequence[Any], b: Sequence[Any], ranks: SlotRanks) -> SlotPanels | None:
        packer = packing.packer_of(module)
        if packer is not None:
            return packer.panels
        dtype = str(a[0].dtype).removeprefix("torch.")
        if dtype not in build.ELEMENTS:
            self._log_once(f"a layer of {dtype}", "is computed by PyTorch's products")
            return None
        return SlotPanels(_product(dtype), a, b, ranks)


def _product(dtype: str) -> Product:
    try:
        return build.product(dtype)
    except build.CannotCompile as error:
        raise InvalidSettings(
            f"there are no compiled LoRA kernels for {dtype} here: {error}",
            expected="a compiler and a processor for it",
            remedy="set LORA_PLUGINS_KERNELS=torch",
        ) from error


class ReferencePunicaWrapper(GroupedPunicaWrapperCPU):
    """The reference in the engine, row by row: slow, for finding out which side of a difference is wrong."""

    def add_lora_linear(
        self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, output_slices: Any, **kwargs: Any
    ) -> None:
        weights = self._weights(lora_a_stacked, lora_b_stacked)
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        reference.lora_linear(
            y, x, weights.a, weights.b, self._slots, weights.ranks, output_slices, scale=scale,
            add_inputs=kwargs.get("add_inputs", True),
        )  # fmt: skip


class _UnknownRanks(SlotRanks):
    """Ranks of slots that are not watched: the largest, and never to be trusted twice."""

    def stamp(self, slot: int) -> int:
        self.version += 1
        return self.version


LEDGER = (
    Patch(
        """
        vllm.lora.punica_wrapper.punica_cpu:
            PunicaWrapperCPU{add_shrink, add_expand, add_lora_embedding}
            PunicaWrapperCPU.add_lora_linear(
                self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer, **kwargs)
            PunicaWrapperCPU.add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, buffer, **kwargs)
        vllm.lora.punica_wrapper.punica_base:
            PunicaWrapperBase{update_metadata, token_lora_indices, sampler_indices}
        """,
        what="subclassed; these methods are overridden. update_metadata is extended: rows are grouped once per batch",
        why="vLLM's work follows max_lora_rank, and before 0.33 base rows get an adapter (vllm-project/vllm#48421)",
        remove="vLLM's CPU kernels group rows and know true ranks",
    ),
)
