"""The served base model, as far as an adapter must fit it: its names, its shapes, the server's largest rank."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.weights import LoraPair, Weights
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.settings import BaseMatch

# The Hub's cache: models--<org>--<name>/snapshots/<commit>
_HUB_CACHE = re.compile(r"(?:^|/)models--(?P<repo>[^/]+)/snapshots/[0-9a-f]{7,64}/?$")
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
# What vLLM takes for --max-lora-rank (`MaxLoRARanks` in vllm/config/lora.py, 0.32 and 0.33).
_SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class BaseModel:
    """What the server serves.

    Attributes:
        path: the model's path or Hub id, as `vllm serve` was given it.
        served_names: the names that requests use for it; the first stands in `/v1/models` as `parent`.
        aliases: further names under which adapters may know it (a setting).
        max_rank: `--max-lora-rank`; None where it is not known.
        lora_enabled: whether the server runs with `--enable-lora`.
        module_shapes: module name to `(in, out)` sizes of every layer that LoRA can adapt, whole (not sharded);
            embeddings count as `(vocabulary, hidden)`, fused experts as `(0, 0)`. Empty where shapes are not known.
    """

    path: str
    served_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    max_rank: int | None = None
    lora_enabled: bool = True
    module_shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def _by_tail(self) -> Mapping[str, frozenset[tuple[int, int]]]:
        tails: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for module, shape in self.module_shapes.items():
            tails[_tail(module)].add(shape)
        return {tail: frozenset(shapes) for tail, shapes in tails.items()}

    @cached_property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any("experts" in module.split(".") for module in self.module_shapes)

    def shapes_of(self, module: str) -> frozenset[tuple[int, int]]:
        """The sizes that a module of this name may have; empty if the model has none of this name.

        An adapter may know the model under another prefix (`language_model.model.` and the like), so names are
        compared from the first layer number on, or by their last part where there is no number.
        """
        exact = self.module_shapes.get(module)
        return frozenset({exact}) if exact is not None else self._by_tail.get(_tail(module), frozenset())

    def matches(self, name: str) -> bool:
        """Whether `name` means this model, also in another spelling: a snapshot in the Hub's cache, a local copy."""
        return self.matches_exactly(name) or any(
            _same_model(name, item) for item in (self.path, *self.served_names, *self.aliases)
        )

    def matches_exactly(self, name: str) -> bool:
        """Whether `name` is exactly the path, a served name or an alias."""
        return name in {self.path, *self.served_names, *self.aliases}


def check_base(config: AdapterConfig, weights: Weights | None, base: BaseModel, mode: BaseMatch) -> tuple[str, ...]:
    """Check an adapter against the served model; returns notes on what was let through.

    `weights` is None where they cannot be read without torch; then only names and ranks are compared.

    Raises:
        IncompatibleAdapter: rank, base model or shapes do not fit.
    """
    if not base.lora_enabled:
        raise IncompatibleAdapter(
            "an adapter, on a server without LoRA", expected="a server started with --enable-lora", remedy="restart it"
        )
    if base.max_rank is not None and config.max_rank > base.max_rank:
        raise IncompatibleAdapter(
            f"rank {config.max_rank}",
            expected=f"at most {base.max_rank}, the server's --max-lora-rank",
            remedy=_rank_remedy(config.max_rank),
        )
    named = _check_name(config, base, mode)
    if weights is not None and base.module_shapes:
        _check_shapes(weights, base, config)
    elif not named and mode is BaseMatch.COMPATIBLE:
        raise IncompatibleAdapter(
            f"base model {config.base_model or 'not named'}, and shapes that cannot be compared",
            expected=f"base model {base.path}",
            remedy="set LORA_PLUGINS_BASE_ALIASES to the name that the adapter uses, or LORA_PLUGINS_BASE_MATCH=off",
        )
    if named or mode is BaseMatch.OFF:
        return ()
    note = f"names base model '{config.base_model}'" if config.base_model else "names no base model"
    return (f"{note}, served is '{base.path}'; accepted because every shape fits",)


def _check_name(config: AdapterConfig, base: BaseModel, mode: BaseMatch) -> bool:
    if mode is BaseMatch.OFF:
        return True
    name = config.base_model
    if mode is BaseMatch.COMPATIBLE:
        return name is not None and base.matches(name)
    if name is None or not base.matches_exactly(name):
        raise IncompatibleAdapter(
            f"base model {name or 'not named'}",
            expected=" or ".join(dict.fromkeys([base.path, *base.served_names, *base.aliases])),
            remedy="correct base_model_name_or_path, add it to LORA_PLUGINS_BASE_ALIASES, "
            "or set LORA_PLUGINS_BASE_MATCH=compatible",
        )
    return True


def _check_shapes(weights: Weights, base: BaseModel, config: AdapterConfig) -> None:
    about_base = f"base model {config.base_model or 'not named'}, served is {base.path}"
    for pair in weights.pairs:
        if pair.is_experts and base.has_experts:
            continue  # fused experts are stored in several layouts; the engine knows which it takes
        allowed = base.shapes_of(pair.module)
        if not allowed:
            raise IncompatibleAdapter(
                f"module '{pair.module}' ({about_base})",
                expected=f"modules of the served model, such as {_examples(base.module_shapes, pair)}",
                remedy="serve this adapter with the base model that it was trained on",
            )
        sizes = (pair.a.shape[1], pair.b.shape[0])
        if sizes not in allowed:
            raise IncompatibleAdapter(
                f"{sizes[0]} inputs and {sizes[1]} outputs in module '{pair.module}' ({about_base})",
                expected=" or ".join(f"{wide} inputs and {high} outputs" for wide, high in sorted(allowed)[:4]),
                remedy="serve this adapter with the base model that it was trained on",
            )
    for module, tensor in weights.base_embeddings:
        # vLLM leaves these copies out, which is right only while they are the base model's own.
        allowed = base.shapes_of(module)
        if allowed and tensor.shape not in allowed and tensor.shape[::-1] not in allowed:
            raise IncompatibleAdapter(
                f"a resized vocabulary in '{tensor.name}', shape {list(tensor.shape)}",
                expected=f"the base model's, {[list(shape) for shape in sorted(allowed)[:2]]}",
                remedy="merge the adapter into the base model",
            )


def _examples(modules: Iterable[str], pair: LoraPair) -> str:
    last = pair.module.rsplit(".", 1)[-1]
    alike = [module for module in modules if module.rsplit(".", 1)[-1] == last]
    return ", ".join(f"'{module}'" for module in (alike or list(modules))[:3])


def _tail(module: str) -> str:
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[index:])
    return parts[-1]


def _same_model(one: str, other: str) -> bool:
    """Whether two names mean the same model.

    A Hub id is its snapshot in a cache, and a local copy under the id's last part; two Hub ids must be equal.
    """
    one, other = _plain_name(one), _plain_name(other)
    if not one or not other:
        return False
    if os.path.isabs(one) and os.path.isabs(other) and os.path.realpath(one) == os.path.realpath(other):
        return True
    if _HUB_ID.fullmatch(one) and _HUB_ID.fullmatch(other):
        return one.lower() == other.lower()
    return os.path.basename(one).lower() == os.path.basename(other).lower()


def _plain_name(name: str) -> str:
    cached = _HUB_CACHE.search(name)
    return cached["repo"].replace("--", "/", 1) if cached else name.rstrip("/")


def _rank_remedy(rank: int) -> str:
    for size in _SLOT_RANKS:
        if size >= rank:
            return f"restart the server with --max-lora-rank {size}"
    return f"train with a lower rank; vLLM's slots take {_SLOT_RANKS[-1]} at most"
