"""Adapters with one fault each, made of right ones: what a trainer's, a converter's or a copy's error leaves behind.

A mutant is an adapter that loads as a file. Each kind of fault is one row of `FAULTS`: a function that changes an
adapter, or returns None where the fault does not apply to this adapter.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.models import ATTENTION, MLP, AdapterSpec

HIDDEN, LAYERS = 128, 4
# q_proj and o_proj are square; gate_proj, up_proj and down_proj have three shapes between them.
SOURCES = (
    AdapterSpec("attention", 8),
    AdapterSpec("all", 16, ATTENTION + MLP),
    AdapterSpec("stable", 16, ATTENTION, {"use_rslora": True}),
    AdapterSpec("words", 8, ("embed_tokens", "lm_head", "q_proj", "down_proj")),
    AdapterSpec(
        "patterns",
        8,
        ATTENTION + MLP,
        {"rank_pattern": {"q_proj": 16, r"2\.mlp\.up_proj": 4}, "alpha_pattern": {"o_proj": 4, "down_proj": 32}},
    ),
)


@dataclass
class Adapter:
    """The tensors by their names in the file, and `adapter_config.json`."""

    tensors: dict[str, Any]
    config: dict[str, Any]


Fault = Callable[[Adapter, random.Random], Adapter | None]


@dataclass(frozen=True)
class Mutant:
    """A mutant's name, the kind of its fault and the adapter it was made of."""

    name: str
    fault: str
    source: str


def build(sources: Mapping[str, Path], directory: Path, times: int, only: str = "") -> Iterator[Mutant]:
    """Write each fault of each source, `times` with other places of the fault, below `directory`."""
    for source, path in sources.items():
        for fault, change in FAULTS.items():
            if only and only not in fault:
                continue
            seen: set[str] = set()
            for seed in range(times):
                found = change(read(path), random.Random(f"{source} {fault} {seed}"))
                if found is None:
                    continue
                name = f"{source}-{re.sub(r'[^a-z0-9]+', '-', fault.lower())}-{seed}"
                write(found, directory / name)
                content = _content(directory / name)
                if content in seen:  # of some faults there is only one
                    _remove(directory / name)
                    continue
                seen.add(content)
                yield Mutant(name, fault, source)


def read(directory: Path) -> Adapter:
    """An adapter as PEFT has saved it."""
    from safetensors.torch import load_file

    config = json.loads((directory / "adapter_config.json").read_text())
    return Adapter(load_file(directory / "adapter_model.safetensors"), config)


def write(adapter: Adapter, directory: Path) -> None:
    """Save it as PEFT does."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in adapter.tensors.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(adapter.config, indent=2))


def _content(directory: Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _remove(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


# --- the parts of names, such as base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight

_PAIR = re.compile(r"(?P<module>.+)\.(?P<side>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?P<end>(\.weight)?)")


def modules_of(adapter: Adapter) -> list[str]:
    """The modules that it has pairs of, as the file names them."""
    found = (_PAIR.fullmatch(name) for name in adapter.tensors)
    return sorted({match["module"] for match in found if match})


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _layer(module: str) -> int | None:
    found = re.search(r"\.layers\.(\d+)\.", module)
    return int(found[1]) if found else None


def _of(module: str, name: str) -> bool:
    return name.startswith(f"{module}.lora_")


def _without(adapter: Adapter, is_gone: Callable[[str], bool]) -> Adapter | None:
    kept = {name: tensor for name, tensor in adapter.tensors.items() if not is_gone(name)}
    return Adapter(kept, adapter.config) if kept and len(kept) < len(adapter.tensors) else None


def _in_layer(layer: int) -> Callable[[str], bool]:
    return lambda name: f".layers.{layer}." in name


def _renamed(adapter: Adapter, change: Callable[[str], str]) -> Adapter | None:
    tensors = {change(name): tensor for name, tensor in adapter.tensors.items()}
    return Adapter(tensors, adapter.config) if tensors.keys() != adapter.tensors.keys() else None


def _configured(adapter: Adapter, **changes: Any) -> Adapter:
    return Adapter(adapter.tensors, {**adapter.config, **changes})


# --- faults


def dropped(*leaves: str) -> Fault:
    def change(adapter: Adapter, rng: random.Random) -> Adapter | None:
        leaf = rng.choice(leaves)
        return _without(adapter, lambda name: f".{leaf}.lora_" in name)

    return change


def layer_missing(adapter: Adapter, rng: random.Random) -> Adapter | None:
    return _without(adapter, _in_layer(rng.randrange(LAYERS)))


def half_of_layers_missing(adapter: Adapter, rng: random.Random) -> Adapter | None:
    first = rng.randrange(2)
    return _without(adapter, lambda name: any(_in_layer(2 * first + one)(name) for one in range(2)))


def module_missing(adapter: Adapter, rng: random.Random) -> Adapter | None:
    module = rng.choice(modules_of(adapter))
    return _without(adapter, lambda name: _of(module, name))


def side_missing(adapter: Adapter, rng: random.Random) -> Adapter | None:
    gone = rng.choice(sorted(adapter.tensors))
    return _without(adapter, lambda name: name == gone)


def scaled_alpha(factor: float) -> Fault:
    def change(adapter: Adapter, rng: random.Random) -> Adapter:
        patterns = {name: factor * alpha for name, alpha in adapter.config["alpha_pattern"].items()}
        return _configured(adapter, lora_alpha=factor * adapter.config["lora_alpha"], alpha_pattern=patterns)

    return change


def alpha_lost(adapter: Adapter, rng: random.Random) -> Adapter:
    del rng
    return _configured(adapter, lora_alpha=8 if adapter.config["lora_alpha"] != 8 else 16, alpha_pattern={})


def alpha_pattern_lost(adapter: Adapter, rng: random.Random) -> Adapter | None:
    return _configured(adapter, alpha_pattern={}) if adapter.config["alpha_pattern"] else None


def rank_pattern_lost(adapter: Adapter, rng: random.Random) -> Adapter | None:
    return _configured(adapter, rank_pattern={}) if adapter.config["rank_pattern"] else None


def rslora_flipped(adapter: Adapter, rng: random.Random) -> Adapter:
    return _configured(adapter, use_rslora=not adapter.config["use_rslora"])


def other_rank(adapter: Adapter, rng: random.Random) -> Adapter:
    return _configured(adapter, r=rng.choice([4, 32, 64]))


def _matrices(adapter: Adapter) -> list[str]:
    return [module for module in modules_of(adapter) if f"{module}.lora_A.weight" in adapter.tensors]


def exchanged(adapter: Adapter, rng: random.Random) -> Adapter:
    """A under B's name, and B under A's, of all modules."""
    sides = {"lora_A": "lora_B", "lora_B": "lora_A"}
    swap = re.compile(r"\.(lora_[AB])\.")
    tensors = {swap.sub(lambda m: f".{sides[m[1]]}.", name): tensor for name, tensor in adapter.tensors.items()}
    return Adapter(tensors, adapter.config)


def exchanged_and_transposed(adapter: Adapter, rng: random.Random) -> Adapter | None:
    """A's values in B, and B's in A, of square modules: every shape stays what it was."""
    tensors = dict(adapter.tensors)
    for module in _matrices(adapter):
        a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        if tensors[a].shape == tensors[b].T.shape:
            tensors[a], tensors[b] = tensors[b].T, tensors[a].T
    return Adapter(tensors, adapter.config)


def transposed(adapter: Adapter, rng: random.Random) -> Adapter:
    module = rng.choice(_matrices(adapter))
    names = [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
    return Adapter({**adapter.tensors, **{name: adapter.tensors[name].T for name in names}}, adapter.config)


def reshaped(adapter: Adapter, rng: random.Random) -> Adapter:
    """B's values in the order of its transpose, in B's shape: what a view instead of a transpose does."""
    module = rng.choice(_matrices(adapter))
    name = f"{module}.lora_B.weight"
    tensor = adapter.tensors[name]
    return Adapter({**adapter.tensors, name: tensor.T.reshape(tensor.shape)}, adapter.config)


def swapped(one: str, other: str) -> Fault:
    """The tensors of two projections under each other's name, in all layers."""

    def change(adapter: Adapter, rng: random.Random) -> Adapter | None:
        names = {one: other, other: one}
        swap = re.compile(rf"\.({one}|{other})\.")
        if not all(any(f".{name}." in tensor for tensor in adapter.tensors) for name in names):
            return None
        return _renamed_values(adapter, lambda name: swap.sub(lambda m: f".{names[m[1]]}.", name))

    return change


def _renamed_values(adapter: Adapter, change: Callable[[str], str]) -> Adapter:
    return Adapter({change(name): tensor for name, tensor in adapter.tensors.items()}, adapter.config)


def layers_permuted(adapter: Adapter, rng: random.Random) -> Adapter:
    order = list(range(LAYERS))
    while order == sorted(order):
        rng.shuffle(order)
    return _renamed_values(
        adapter, lambda name: re.sub(r"\.layers\.(\d+)\.", lambda m: f".layers.{order[int(m[1])]}.", name)
    )


def layers_shifted(by: int) -> Fault:
    def change(adapter: Adapter, rng: random.Random) -> Adapter:
        shift = re.compile(r"\.layers\.(\d+)\.")
        return _renamed_values(adapter, lambda name: shift.sub(lambda m: f".layers.{int(m[1]) + by}.", name))

    return change


def layer_twice(adapter: Adapter, rng: random.Random) -> Adapter:
    one, other = rng.sample(range(LAYERS), 2)
    copied = {
        name: adapter.tensors[name.replace(f".layers.{one}.", f".layers.{other}.")]
        for name in adapter.tensors
        if _in_layer(one)(name)
    }
    shapes = all(tensor.shape == adapter.tensors[name].shape for name, tensor in copied.items())
    return Adapter({**adapter.tensors, **copied} if shapes else adapter.tensors, _scaled_if(adapter, not shapes))


def _scaled_if(adapter: Adapter, is_so: bool) -> dict[str, Any]:
    return {**adapter.config, "lora_alpha": 3 * adapter.config["lora_alpha"]} if is_so else adapter.config


def renamed_to(old: str, new: str) -> Fault:
    def change(adapter: Adapter, rng: random.Random) -> Adapter | None:
        return _renamed(adapter, lambda name: name.replace(old, new))

    return change


def side_by_side(name: str, shape: tuple[int, ...]) -> Fault:
    """A further tensor that is none of a plain adapter."""

    def change(adapter: Adapter, rng: random.Random) -> Adapter:
        import torch

        module = rng.choice(_matrices(adapter))
        full = name if name.startswith("base_model") else f"{module}.{name}"
        return Adapter({**adapter.tensors, full: torch.ones(shape)}, adapter.config)

    return change


def configured(**changes: Any) -> Fault:
    return lambda adapter, rng: _configured(adapter, **changes)


def values(change: Callable[[Any, random.Random], Any], side: str = "B", *, everywhere: bool = False) -> Fault:
    """The values of one module's side, or of all modules', changed."""

    def apply(adapter: Adapter, rng: random.Random) -> Adapter:
        ends = (f".lora_{side}.weight", f".lora_embedding_{side}")
        names = [name for name in sorted(adapter.tensors) if name.endswith(ends)]
        chosen = names if everywhere else [rng.choice(names)]
        tensors = {name: change(adapter.tensors[name].clone(), rng) for name in chosen}
        return Adapter({**adapter.tensors, **tensors}, adapter.config)

    return apply


def _one_value(number: float) -> Callable[[Any, random.Random], Any]:
    def change(tensor: Any, rng: random.Random) -> Any:
        tensor.view(-1)[rng.randrange(tensor.numel())] = number
        return tensor

    return change


def _rows_moved(tensor: Any, rng: random.Random) -> Any:
    return tensor.roll(tensor.shape[0] // 2, 0)


def _rotated(tensor: Any, rng: random.Random) -> Any:
    """Rows of each head of 64 interleaved, as Meta's and Mistral's own checkpoints have queries and keys."""
    return tensor.view(-1, 2, 32, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def rotated(adapter: Adapter, rng: random.Random) -> Adapter | None:
    tensors = {
        name: _rotated(tensor, rng) if re.search(r"\.[qk]_proj\.lora_B", name) else tensor
        for name, tensor in adapter.tensors.items()
    }
    return Adapter(tensors, adapter.config)


def ranks_cut(adapter: Adapter, rng: random.Random) -> Adapter:
    """Half of each rank, as the configuration then says; alpha stays, so that the scaling doubles."""
    tensors = {}
    for name, tensor in adapter.tensors.items():
        side = _PAIR.fullmatch(name)
        is_a = side is not None and side["side"].endswith("A")
        tensors[name] = tensor[: tensor.shape[0] // 2] if is_a else tensor[:, : tensor.shape[1] // 2]
    patterns = {name: rank // 2 for name, rank in adapter.config["rank_pattern"].items()}
    return Adapter(tensors, {**adapter.config, "r": adapter.config["r"] // 2, "rank_pattern": patterns})


def fused_in_one(adapter: Adapter, rng: random.Random) -> Adapter | None:
    """q_proj's pair under the name of the engine's fused module."""
    return _renamed(adapter, lambda name: name.replace(".q_proj.", ".qkv_proj."))


def resized(adapter: Adapter, rng: random.Random) -> Adapter:
    import torch

    module = rng.choice(_matrices(adapter))
    name = f"{module}.lora_A.weight"
    return Adapter({**adapter.tensors, name: torch.cat([adapter.tensors[name]] * 2, 1)}, adapter.config)


FAULTS: dict[str, Fault] = {
    # Something is lost.
    "head dropped": dropped("lm_head"),
    "embedding dropped": dropped("embed_tokens"),
    "a target dropped": dropped("q_proj", "o_proj", "down_proj"),
    "a part of a fused module dropped": dropped("k_proj", "v_proj", "up_proj"),
    "one layer missing": layer_missing,
    "half of the layers missing": half_of_layers_missing,
    "one module missing": module_missing,
    "A or B missing": side_missing,
    # Numbers of the configuration.
    "alpha doubled": scaled_alpha(2),
    "alpha halved": scaled_alpha(0.5),
    "alpha of the wrong sign": scaled_alpha(-1),
    "alpha of a default": alpha_lost,
    "alpha 0": configured(lora_alpha=0, alpha_pattern={}),
    "alpha pattern lost": alpha_pattern_lost,
    "rank pattern lost": rank_pattern_lost,
    "another rank in the configuration": other_rank,
    "rsLoRA flipped": rslora_flipped,
    # Tensors in another place or order.
    "A and B exchanged": exchanged,
    "A and B exchanged and transposed": exchanged_and_transposed,
    "a pair transposed": transposed,
    "B viewed, not transposed": reshaped,
    "queries and outputs swapped": swapped("q_proj", "o_proj"),
    "keys and values swapped": swapped("k_proj", "v_proj"),
    "first and third of an MLP swapped": swapped("gate_proj", "up_proj"),
    "third and second of an MLP swapped": swapped("up_proj", "down_proj"),
    "queries and keys in Meta's order": rotated,
    "layers permuted": layers_permuted,
    "layers one too high": layers_shifted(1),
    "one layer in another's place": layer_twice,
    "half of each rank": ranks_cut,
    # Names.
    "a target renamed": renamed_to(".q_proj.", ".query."),
    "queries under the fused name": fused_in_one,
    "another prefix": renamed_to("base_model.model.model.", "base_model.model.transformer."),
    "a module that the engine has not": renamed_to(".self_attn.", ".cross_attn."),
    "MLX's names": renamed_to(".lora_A.weight", ".lora_a"),
    "a tensor more": side_by_side("base_model.model.model.layers.0.self_attn.q_norm.lora_A.weight", (8, 128)),
    # Other methods than plain LoRA.
    "DoRA": configured(use_dora=True),
    "DoRA's magnitudes without the flag": side_by_side("lora_magnitude_vector.weight", (128,)),
    "a bias without the flag": side_by_side("lora_B.bias", (128,)),
    "modules_to_save": configured(modules_to_save=["lm_head"]),
    "a saved module without the key": side_by_side("base_model.model.lm_head.weight", (512, 128)),
    "a norm without the key": side_by_side("base_model.model.model.norm.weight", (128,)),
    "PiSSA": configured(init_lora_weights="pissa"),
    "trained tokens": configured(trainable_token_indices=[1, 2]),
    "another method": configured(peft_type="LOHA"),
    # Values.
    "not a number": values(_one_value(float("nan"))),
    "one value far too large": values(_one_value(1e4)),
    "B zero in one module": values(lambda tensor, rng: 0 * tensor),
    "B zero in all modules": values(lambda tensor, rng: 0 * tensor, everywhere=True),
    "A zero in all modules": values(lambda tensor, rng: 0 * tensor, "A", everywhere=True),
    "B of the wrong sign in one module": values(lambda tensor, rng: -tensor),
    "B's rows moved by half": values(_rows_moved),
    "more inputs": resized,
}
