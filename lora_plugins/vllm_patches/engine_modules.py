"""The LoRA modules of the engine's model, asked of the workers once, and an adapter's names as vLLM reads them.

`ask_engine` runs in an API server, before the first adapter is judged; the two methods that `patch` gives to
`WorkerBase` answer in the workers. Every plugin of ours that serves adapters patches, the resolvers by themselves too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from lora_plugins.adapter.landing import Model, Respell
from lora_plugins.adapter.model_modules import ModelModules

METHOD = "lora_plugins_model_modules"
TELL_METHOD = "lora_plugins_whole_model"


def patch() -> None:
    """Have every worker of the process answer; a second call changes nothing.

    `WorkerBase` gets `lora_plugins_model_modules` and `lora_plugins_whole_model`, called once by `collective_rpc`.
    `load_lora_model` puts the manager at `model_runner.lora_manager`.

    Touches:
        vllm.v1.worker.worker_base: WorkerBase{model_runner}
        vllm.v1.worker.lora_model_runner_mixin: LoRAModelRunnerMixin.load_lora_model(self, model, vllm_config, device)
        vllm.v1.engine.async_llm: AsyncLLM.collective_rpc(self, method, timeout, args, kwargs)
    Why: only the engine knows which modules its model has, and their sizes.
    Until: vLLM says over its API which modules adapters can be for.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, METHOD, _model_modules)
    setattr(WorkerBase, TELL_METHOD, _whole_model)


def _model_modules(self: Any) -> dict[str, Any] | None:  # `self` is a WorkerBase
    from lora_plugins.worker.model_description import describe

    manager = getattr(self.model_runner, "lora_manager", None)
    return None if manager is None else describe(manager._adapter_manager).plain()  # noqa: SLF001 - vLLM's own name


def _whole_model(self: Any, plain: dict[str, Any]) -> None:  # `self` is a WorkerBase
    manager = getattr(self.model_runner, "lora_manager", None)
    if manager is not None:
        manager.whole_model = ModelModules.of_plain(plain)


async def ask_engine(client: Any) -> ModelModules | None:
    """Return the modules of all workers, as pipeline stages have some modules each; None where LoRA is off.

    The workers then get all modules. With data parallelism the first engine answers: all engines serve the same model.
    """
    answers = [ModelModules.of_plain(answer) for answer in await client.collective_rpc(METHOD) if answer is not None]
    if not answers:
        return None
    # Stages of a pipeline name different modules; ranks of tensor parallelism the same.
    whole = functools.reduce(ModelModules.joined, answers)
    if any(answer != whole for answer in answers):
        await client.collective_rpc(TELL_METHOD, args=(whole.plain(),))
    return whole


def model_of(modules: ModelModules) -> Model:
    """Return the modules, with vLLM's way of reading names and Transformers' other spellings."""
    return Model(modules, reader_of_names(modules), respellings_of(modules))


def reader_of_names(modules: ModelModules) -> Callable[[str], tuple[str, bool]]:
    """Return vLLM's `parse_fine_tuned_lora_name` with the model's own mapping: a name's module, and whether A or B.

    The function raises ValueError for a tensor that is no LoRA weight.

    Touches:
        vllm.lora.utils: parse_fine_tuned_lora_name(name, weights_mapper)
        vllm.model_executor.models.utils:
            WeightsMapper{orig_to_new_prefix, orig_to_new_substr, orig_to_new_suffix, orig_to_new_regex}
    Why: names in an adapter are read by vLLM's own function, with the model's mapping.
    Until: vLLM says over its API where an adapter's tensors land.
    """
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = _mapper(modules)
    return lambda name: parse_fine_tuned_lora_name(name, mapper)


def respellings_of(modules: ModelModules) -> tuple[Respell, ...]:
    """Return how Transformers 5 renames this model's modules, and back; nothing with Transformers 4.

    Checkpoints, and so adapters, name modules as the Transformers version that made them; vLLM's model uses the
    names of one version.
    """
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:
        return ()
    found = get_checkpoint_conversion_mapping(modules.architecture) or get_checkpoint_conversion_mapping(
        modules.model_type
    )
    renamings = [one for one in found or () if isinstance(one, WeightRenaming)]
    if not renamings:
        return ()
    return tuple(
        functools.partial(_respell, steps)
        # Backwards in the opposite order: each step undoes the last one that was done.
        for steps in (renamings, [one.reverse_transform() for one in renamings[::-1]])
    )


def _respell(renamings: Sequence[Any], module: str) -> str:
    name = f"{module}.weight"  # patterns may end at the weight
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name.removesuffix(".weight")


def _mapper(modules: ModelModules) -> Any:
    renames = modules.renames
    if not any(renames.values()):
        return None
    from vllm.model_executor.models.utils import WeightsMapper

    fields: dict[str, Any] = {
        "orig_to_new_regex": {re.compile(pattern, flags): new for pattern, flags, new in renames["regex"]},
        "orig_to_new_substr": renames["substr"],
        "orig_to_new_prefix": renames["prefix"],
        "orig_to_new_suffix": renames["suffix"],
    }
    if renames["renaming"]:
        from transformers.core_model_loading import WeightRenaming

        fields["orig_to_new_renaming"] = [WeightRenaming(*patterns) for patterns in renames["renaming"]]
    return WeightsMapper(**fields)
