"""Four-bit checkpoints of a small float model (AWQ, GPTQ), and the float model whose values each of them holds.

Sources: the loaders in vllm/model_executor/layers/quantization of 0.32.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 64  # inputs that share a scale
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_CONFIG: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
}


def quantise(base: Path, home: Path, scheme: str) -> tuple[Path, Path]:
    """Write `home/scheme`, quantised, and `home/scheme-float`, the same values in float32."""
    made, plain = home / scheme, home / f"{scheme}-float"
    for directory in (made, plain):
        shutil.copytree(base, directory)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = values[name] = weight
            continue
        parts, values[name] = _four_bits(weight.float(), is_awq=scheme == "awq")
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, made / "model.safetensors", {"format": "pt"})
    floats = {name: tensor.float().contiguous() for name, tensor in values.items()}
    save_file(floats, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": _CONFIG[scheme]}))
    return made, plain


def _four_bits(weight: torch.Tensor, *, is_awq: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    inputs = weight.t()
    groups = inputs.reshape(-1, GROUP, inputs.shape[1])
    scales = (groups.abs().amax(1) / 7).to(torch.float16)
    wide = scales.float().repeat_interleave(GROUP, 0)
    whole = (inputs / wide).round().clamp(-8, 7).to(torch.int64) + 8
    zeros = torch.full(scales.shape, 8 if is_awq else 7, dtype=torch.int64)  # GPTQ stores one less
    order = _AWQ_ORDER if is_awq else tuple(range(8))
    parts = {"scales": scales, "qzeros": _packed(zeros, order)}
    parts["qweight"] = _packed(whole, order) if is_awq else _packed(whole.t(), order).t()
    if not is_awq:
        parts["g_idx"] = (torch.arange(inputs.shape[0]) // GROUP).to(torch.int32)
    return parts, ((whole - 8) * wide).t()


def _packed(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    eights = values.reshape(values.shape[0], -1, 8)[..., list(order)]
    return (eights << (4 * torch.arange(8))).sum(-1).to(torch.uint32).view(torch.int32)
