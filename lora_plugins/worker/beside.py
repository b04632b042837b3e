"""The tensors that an adapter's file has beside A and B, which vLLM's reader was not shown (`weights_file.py`).

A worker's loading thread calls `read_beside` once for each adapter, after vLLM has parsed A and B. `vectors.py`
(biases, magnitudes of DoRA, factors of IA3) and `trained_tokens.py` (rows of tokens) take what is theirs from the
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lora_plugins.adapter.config import CONFIG_FILE, AdapterConfig, parse_config
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weights import Beside, pair_weights
from lora_plugins.worker.weights_file import MappedTensors


@dataclass(frozen=True, slots=True)
class ReadBeside:
    """The tensors that vLLM was not shown.

    Attributes:
        module: returns the engine's name for the module of an A's name.
    """

    config: AdapterConfig
    beside: tuple[Beside, ...]
    module: Callable[[str], str]
    _tensors: dict[str, torch.Tensor]

    def tensor(self, one: Beside) -> torch.Tensor:
        """Return the tensor itself, a window into the file."""
        return self._tensors[one.tensor.name]


def read_beside(opened: MappedTensors | None, model: Any) -> ReadBeside | None:
    """Return what is beside A and B in the file that vLLM has opened for an adapter; None without such tensors.

    Args:
        opened: the file; None where vLLM opened none.
        model: vLLM's, with its mapping of names.

    Raises:
        IncompatibleAdapter, InvalidAdapter: as `pair_weights`.

    Touches: vllm.lora.utils: parse_fine_tuned_lora_name(name, weights_mapper)
    Why: what is beside A and B is of the module that vLLM reads off A's name.
    Until: vLLM serves trained tokens and DoRA (vllm-project/vllm#55796, vllm-project/vllm#47395).
    """
    from vllm.lora.utils import parse_fine_tuned_lora_name

    if opened is None or not opened.beside:
        return None
    # Only here: the configuration in a path of a caller's own is for vLLM to judge.
    config = parse_config((opened.directory / CONFIG_FILE).read_bytes())
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    tensors = {**opened, **opened.beside}
    weights = pair_weights((TensorInfo(name, "", tuple(one.shape), 0, 0) for name, one in tensors.items()), config)
    return ReadBeside(
        config, weights.beside, lambda name: str(parse_fine_tuned_lora_name(name, mapper)[0]), opened.beside
    )
