"""An adapter's vectors in a worker: each module with any computes `y = g * (W x + s B A x) + c`.

`s` is the adapter's scaling; `g` and `c` are the vectors, a number for each output.

A worker's loading thread calls `vectors_of_adapter` for an adapter with tensors beside A and B: DoRA's magnitudes,
biases, factors of IA3. The answer, `AdapterVectors`, is a part of the `LoadedAdapter`, and gives each slot of the
adapter its g and c (`SlotRanks.turn`).

vLLM hands kernels `y0 = W x + b`, with the layer's own bias. Kernels add the product, and then compute `g * y + c'`,
where `c' = c + (1 - g) b`. So B stays as it is, and a vector may be known later than A and B.

DoRA's `g = magnitude / |row of W + s B A|` needs norms (`row_norms.py`). Of a row-parallel layer each worker has a part
of the squares, of an embedding and a head the squares of its own words, which are tokens of the vocabulary. The workers
add the parts up at the first activation (`settle`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast

import torch

from lora_plugins.adapter.model_modules import ModelModules
from lora_plugins.adapter.vector_places import NEUTRAL, vectors_of
from lora_plugins.adapter.weights import PREFIX, Beside, BesideKind
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter
from lora_plugins.kernels.layers import option_without_vectors, sides_of_slices, stacks, watched_ranks
from lora_plugins.kernels.slot_ranks import SlotRanks, Vectors
from lora_plugins.worker.beside import ReadBeside
from lora_plugins.worker.row_norms import InLoop, shows_rows, squared_norms, squared_norms_of_words
from lora_plugins.worker.token_layers import base_of

_MERGE = "merge the adapter into the base model"


def why_no_vectors(manager: Any) -> str:
    """Return why layers of this engine compute no vectors, a part of a sentence; empty where linear layers do.

    Touches: vllm.lora.layers.base: BaseLayerWithLoRA{punica_wrapper}
    Why: an adapter with vectors is refused where a layer would leave them out.
    Until: vLLM serves DoRA (vllm-project/vllm#47395).
    """
    wrappers = {type(module.punica_wrapper) for module in manager.modules.values()}
    if not all(getattr(wrapper, "computes_vectors", False) for wrapper in wrappers):
        return (
            "as these LoRA kernels compute no more; those of the plugin lora_kernels do, "
            "on GPUs with LORA_PLUGINS_KERNELS=triton"
        )
    option = option_without_vectors(manager.lora_config)
    return f"as this server runs with {option}" if option else ""


class AdapterVectors:
    """The vectors of one adapter.

    Attributes:
        size_bytes: of all vectors of the adapter in this worker.
    """

    def __init__(self, modules: list[_Numbers], *, is_pinned: bool) -> None:
        """`is_pinned`: whether the vectors are page-locked, for copies to a CUDA device that do not wait."""
        widths = [len(module.c) for module in modules]
        # One piece, taken in the loading thread: page-locked memory is slow to get.
        # `settle` may run outside of inference mode, where PyTorch refuses to write tensors of inference mode.
        with torch.inference_mode(mode=False):
            memory = torch.empty(2, sum(widths), pin_memory=is_pinned)
        self.size_bytes = memory.nbytes
        self._unsettled = list(zip(modules, memory.split(widths, 1), strict=True))
        self._vectors: list[tuple[SlotRanks, Vectors]] = []
        # Without parts to add up among workers, the loading thread computes the vectors here.
        if not any(module.is_divided for module in modules):
            self.settle()

    def settle(self) -> None:
        """Compute the vectors that are not known yet; a second call changes nothing.

        Where workers add up their parts, the engine loop of each worker makes the call.

        Raises:
            IncompatibleAdapter: a vector that is not finite.
        """
        unsettled, self._unsettled = self._unsettled, []
        divided = [module for module, _ in unsettled if module.is_divided]
        if divided:
            # One exchange, after which all workers have the same numbers, and the same verdict.
            sums = _sum_of_workers(torch.cat([module.squares for module in divided]))
            for module, squares in zip(divided, sums.split([len(one.squares) for one in divided]), strict=True):
                module.squares = squares
        for module, memory in unsettled:
            memory.copy_(torch.stack(module.vectors()))
            self._vectors.append((module.ranks, Vectors(*memory)))

    def write(self, slot: int) -> None:
        for ranks, vectors in self._vectors:
            ranks.turn(slot, vectors)


@dataclass(slots=True)
class _Numbers:
    """One module's numbers for each of this worker's outputs, float32.

    Attributes:
        name: the engine's name of the module.
        magnitude, squares: of DoRA's `g = magnitude / sqrt(squares)`; None without DoRA.
        g: the factors of a module without DoRA. c: as in the formula of this file.
        bias: the part of the layer's own bias in `y0`.
        is_divided: whether the squares are a part of a sum over workers.
    """

    name: str
    ranks: SlotRanks
    g: Any
    c: Any
    bias: Any
    magnitude: Any = None
    squares: Any = None
    is_divided: bool = False

    def vectors(self) -> Vectors:
        g = self.g if self.magnitude is None else self.magnitude / self.squares.sqrt()
        made = Vectors(g, self.c + (1 - g) * self.bias)
        if not all(bool(side.isfinite().all()) for side in made):
            raise IncompatibleAdapter(
                f"a vector of '{self.name}' that is not finite",
                expected="rows of W + s B A with a norm above 0",
                remedy=f"train it again, or {_MERGE}",
            )
        return made


def vectors_of_adapter(
    read: ReadBeside | None, model: Any, manager: Any, modules: ModelModules, in_loop: InLoop, *, is_whole_model: bool
) -> AdapterVectors | None:
    """Return the vectors of an adapter that vLLM has parsed, and neither merged nor scaled; None without any.

    Args:
        read: what is beside A and B.
        model: vLLM's `LoRAModel`.
        manager: its `LoRAModelManager`. Where its device is CUDA, the vectors are page-locked.
        modules: the engine's modules, as `describe` returns them.
        in_loop: see `LoopWork.run`.
        is_whole_model: as for `vectors_of`.

    Raises:
        IncompatibleAdapter: as `vectors_of`; a bias where the layer has none; vectors that are not finite.
        InvalidAdapter: a form that the store would have converted.

    Touches:
        vllm.lora.layers.base_linear: BaseLinearLayerWithLoRA{base_layer, output_slices}
        vllm.lora.layers.row_parallel_linear: RowParallelLinearWithLoRA
        vllm.lora.model_manager: LoRAModelManager{device}
        vllm.lora.lora_weights: LoRALayerWeights{lora_a, lora_b, scaling}
        vllm.model_executor.layers.linear: LinearBase{skip_bias_add, tp_size, tp_rank}
        vllm.model_executor.layers.vocab_parallel_embedding:
            VocabParallelEmbedding{tp_size, tp_rank} ParallelLMHead{bias}
        vllm.distributed.parallel_state: get_tp_group() GroupCoordinator{cpu_group}
    Why: vLLM has neither DoRA nor biases of adapters.
    Until: vLLM serves them (vllm-project/vllm#47395).
    """
    if read is None:
        return None
    if any(one.kind is BesideKind.SINGULAR for one in read.beside):
        raise InvalidAdapter(
            "AdaLoRA's singular values", expected="values multiplied into A", remedy="ask for the adapter by its name"
        )
    of_module: dict[str, dict[str, dict[BesideKind, Beside]]] = defaultdict(lambda: defaultdict(dict))
    for one, key in vectors_of(read.beside, modules, read.module, is_whole_model=is_whole_model):
        of_module[modules.places[key].module][key][one.kind] = one
    made = []
    for name in manager.modules:  # one order in all workers
        if name in of_module:
            parts = manager.packed_modules.get(name) or [name]
            # A head's wrapper is of the layer of logits; the head itself has the weight.
            base = base_of(manager.model.get_submodule(name))
            layer = _LayerVectors(manager.modules[name], base, name, [of_module[name].get(part, {}) for part in parts])
            made.append(layer.numbers(read, model, in_loop))
    return AdapterVectors(made, is_pinned=torch.device(manager.device).type == "cuda") if made else None


class _LayerVectors:
    """A layer with LoRA, and an adapter's tensors for each of its parts: q, k and v, or one part alone.

    Args:
        layer: vLLM's layer with LoRA. base: the layer inside, with the weight.
        name: the engine's name of the module.
        parts: what is beside A and B of each part, by kind.
    """

    def __init__(self, layer: Any, base: Any, name: str, parts: list[dict[BesideKind, Beside]]) -> None:
        from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA

        self._layer, self._base, self._name, self._parts = layer, base, name, parts
        a, b = cast("tuple[Any, Any]", stacks(layer))
        self._stack = a[0]  # for the dtype and the device of all A's
        self._widths = [int(one.shape[2]) for one in b]
        self._has_words = not isinstance(layer.lora_a_stacked, tuple)
        self._is_divided = (self._has_words or isinstance(layer, RowParallelLinearWithLoRA)) and base.tp_size > 1

    def numbers(self, read: ReadBeside, model: Any, in_loop: InLoop) -> _Numbers:
        """Return the numbers of all parts together; see `vectors_of_adapter`."""
        own = getattr(self._base, "bias", None)
        if self._has_words and (own is not None or not shows_rows(self._base)):
            raise IncompatibleAdapter(
                f"magnitudes of '{self._name}'", expected="none, as it has a bias or no rows to look up", remedy=_MERGE
            )
        # A and B of each part, None where the adapter has vectors alone.
        weights = [self._weights(part, read, model) for part in self._parts]
        beside = {
            kind: self._whole(
                [read.tensor(it[kind]).float().flatten() if kind in it else None for it in self._parts], neutral
            )
            for kind, neutral in NEUTRAL.items()
        }
        scale = self._whole([one and torch.full((len(one.lora_b),), float(one.scaling)) for one in weights], 0)
        zeros = torch.zeros(sum(self._widths))
        bias = zeros if own is None else own.detach().float().cpu()
        # A bias of the adapter takes the place of the layer's own bias.
        given = [torch.ones(it[BesideKind.BIAS].tensor.shape) if BesideKind.BIAS in it else None for it in self._parts]
        is_given = self._whole(given, 0).bool()
        if own is None and bool(is_given.any()):
            raise IncompatibleAdapter(
                f"a bias of '{self._name}'", expected="none, as the base model has none there", remedy=_MERGE
            )
        c = scale * beside[BesideKind.B_BIAS] + torch.where(is_given, beside[BesideKind.BIAS] - bias, zeros)
        factors = beside[BesideKind.OUTPUTS] * beside[BesideKind.INPUTS]
        c = c + (factors - 1) * bias
        # Workers that each have a part of the sum add up their outputs: c and bias come from the first worker alone.
        adds = not self._is_divided or self._base.tp_rank == 0
        made = _Numbers(
            self._name,
            cast("SlotRanks", watched_ranks(self._layer)),  # `why_no_vectors` has found our kernels
            g=factors,
            c=c if adds else zeros,
            bias=bias if adds and not getattr(self._base, "skip_bias_add", False) else zeros,
        )
        if any(BesideKind.MAGNITUDE in part for part in self._parts):
            made.magnitude, made.is_divided = beside[BesideKind.MAGNITUDE], self._is_divided
            made.squares = self._squares(weights, in_loop)
        return made

    def _weights(self, part: dict[BesideKind, Beside], read: ReadBeside, model: Any) -> Any:
        """Return a part's A and B, found by the names of the tensors beside them; None without A and B."""
        names = (read.module(f"{PREFIX}{one.module}.lora_A.weight") for one in part.values())
        return next((model.loras[name] for name in names if name in model.loras), None)

    def _sides(self, lora_a: list[Any], lora_b: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return A and B of each slice of this worker, for A and B of each part of the whole layer."""
        n = len(self._widths)
        # As for vLLM's `set_lora`: a layer of one slice takes tensors, other layers take lists.
        sides = sides_of_slices(self._layer, n, *((lora_a, lora_b) if n > 1 else (lora_a[0], lora_b[0])))
        if sides is None or any(
            b is not None and len(b) != width for b, width in zip(sides[1], self._widths, strict=True)
        ):
            raise IncompatibleAdapter(
                f"a vector of '{self._name}' of another size", expected=f"{self._widths} here", remedy=_MERGE
            )
        return sides

    def _whole(self, parts: list[Any], neutral: float) -> Any:
        """Return a vector of this worker's outputs, for the vectors of each part; None: a part of `neutral` numbers."""
        if all(part is None for part in parts):
            return torch.full((sum(self._widths),), neutral)
        # Each vector is divided as a B of one column; A does not matter.
        nothing = torch.empty(0, 0)
        _, columns = self._sides([nothing] * len(parts), [None if one is None else one[:, None] for one in parts])
        return torch.cat(
            [
                torch.full((width,), neutral) if one is None else one[:, 0]
                for one, width in zip(columns, self._widths, strict=True)
            ]
        )

    def _squares(self, weights: list[Any], in_loop: InLoop) -> Any:
        """Return the squared norms of the rows of `W + s B A`, or 1 where a slice is not adapted."""
        dtype = self._stack.dtype
        # A as it is served; the scaling is exact in float32.
        lora_a = [None if one is None else one.lora_a.to(dtype) for one in weights]
        lora_b = [None if one is None else one.lora_b.float() * float(one.scaling) for one in weights]
        slices_a, slices_b = self._sides(lora_a, lora_b)
        if self._has_words:
            return squared_norms_of_words(self._base, self._stack, slices_a[0].float(), slices_b[0], in_loop)
        return squared_norms(self._base, self._stack, slices_a, slices_b, self._widths, in_loop=in_loop)


def _sum_of_workers(numbers: Any) -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    torch.distributed.all_reduce(numbers, group=get_tp_group().cpu_group)
    return numbers
