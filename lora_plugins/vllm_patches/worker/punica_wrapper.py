"""Our kernels behind vLLM's punica wrapper, the object by which each layer with LoRA computes its adapters.

`patch` runs in every process as the plugin `lora_kernels` is loaded; its effect is in workers, where vLLM makes a
punica wrapper of the class that the platform names. The wrapper then gets each layer, for the true ranks of the
adapters in its slots. `base_rows_get_an_adapter` runs in the API server, for a warning of the log.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

from lora_plugins import __version__
from lora_plugins.kernels import dispatch
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.slot_ranks import at_once
from lora_plugins.log import logger
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.wrapping import wrap

_OURS = "_lora_plugins_kernels"  # marks a patched platform


def patch(settings: Settings) -> None:
    """Have vLLM make its layers with our wrapper in this process, and log the choice; a second call changes nothing.

    Raises:
        InvalidSettings: the chosen kernels cannot be had on this machine.
    """
    from vllm.platforms import current_platform

    if hasattr(type(current_platform), _OURS):
        return
    platform = platform_name(current_platform)
    machine = dispatch.Machine(
        platform, dispatch.triton_is_there(), build.problem, lambda: architecture(current_platform)
    )
    choice = dispatch.choose(settings.kernels, machine)
    logger.info("LoRA kernels: %s (%s)", choice.kernels, choice.why)
    if choice.wrapper is not None:  # else vLLM's own kernels
        use_wrapper(choice.wrapper)


def platform_name(platform: Any) -> str:
    """Return our name of a platform: `cpu`, `cuda`, `rocm`, ... vLLM's `device_type` is "cuda" on ROCm too."""
    return "rocm" if platform.is_rocm() else str(platform.device_type)


def architecture(platform: Any) -> str | None:
    """Return the first GPU's architecture, such as `sm_90`, found without starting CUDA, or None."""
    capability = platform.get_device_capability()
    return None if capability is None else f"sm_{capability.to_int()}"


def use_wrapper(dotted_name: str) -> None:
    """Have vLLM make the punica wrapper of this name, register layers with it, and compile models apart for it.

    Replaces `get_punica_wrapper` of the current platform's class; the other methods are called, to choose the kernels.

    Touches:
        vllm.platforms.interface:
            Platform{device_type, is_rocm(self), get_device_capability(cls, device_id), get_punica_wrapper(cls)}
            DeviceCapability.to_int(self)
    Why: vLLM makes every layer's kernels from this dotted name, in every process.
    Until: vLLM lets a plugin name its LoRA kernels.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    # On the class: vLLM pickles no platform, and each process finds its own `current_platform`.
    setattr(platform, _OURS, True)
    platform.get_punica_wrapper = classmethod(lambda _: dotted_name)
    patch_hash()
    register_layers()


def patch_hash() -> None:
    """Have vLLM compile models apart for our kernels and for our hooks; a second call changes nothing."""
    from vllm.config.lora import LoRAConfig

    wrap(LoRAConfig, "compute_hash", _compute_hash)


def _compute_hash(original: Any, self: Any) -> str:
    """Have the wrapper's name and our version be part of the hash.

    Why: a restart with other kernels, or with hooks (`worker/trained_tokens.py`), would load the model that was
        compiled with the earlier ones, or without.
    Until: vLLM's hash has the name of the punica wrapper.
    """
    from vllm.platforms import current_platform

    # A compiled model calls the operators of the wrapper that it was traced with, whatever a later start chooses.
    factors = original(self), current_platform.get_punica_wrapper(), __version__
    return hashlib.sha256(repr(factors).encode()).hexdigest()


def register_layers() -> None:
    """Have every layer with LoRA register with its punica wrapper, which gets the true ranks of all layers at once."""
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager

    wrap(BaseLayerWithLoRA, "set_mapping", _set_mapping)
    wrap(LoRAModelManager, "activate_adapter", _activate_adapter)


def _set_mapping(original: Any, self: Any, punica_wrapper: Any) -> None:
    """Give our punica wrapper the layer.

    Why: a punica wrapper is given tensors only, padded to max_lora_rank; the layer knows the true ranks.
    Until: vLLM gives punica wrappers the true rank of each slot.
    """
    original(self, punica_wrapper)
    punica_wrapper.register(self)


def _activate_adapter(original: Any, self: Any, lora_id: int) -> bool:
    """Announce to the device once what is written into the slots of all layers.

    Why: a launch for each layer's rank would cost more than the copy of all.
    Until: vLLM gives punica wrappers the true rank of each slot.
    """
    with at_once():
        return bool(original(self, lora_id))


def base_rows_get_an_adapter() -> bool:
    """Return whether vLLM's own kernels run, on the CPU, and compute base-model rows with an adapter.

    Reads the source of vLLM's function: index -1 may be masked there.

    Touches:
        vllm.lora.ops.torch_ops.lora_ops:
            bgmv_shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        vllm.platforms.interface: Platform.is_cpu(self)
    Why: on the CPU, vLLM before 0.33 computes base-model rows with the last slot's adapter.
    Until: 0.32 is no longer supported.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.platforms import current_platform

    is_vllms_on_cpu = not hasattr(type(current_platform), _OURS) and bool(current_platform.is_cpu())
    return is_vllms_on_cpu and dispatch.base_rows_get_an_adapter(inspect.getsource(lora_ops))
