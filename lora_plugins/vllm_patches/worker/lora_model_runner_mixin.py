"""The class that vLLM's workers make their LoRA manager of: ours, or ours with another package's loading.

Runs in each worker, as vLLM loads the model: `LoRAModelRunnerMixin.load_lora_model` is wrapped
(vllm/v1/worker/lora_model_runner_mixin.py, 0.30 to 0.33). Another package may have put its own class into the mixin,
before our plugins were loaded or after (Unsloth does). Then a class of ours reads the adapters' files by the method of
that class, and loads the adapters that the scheduler names, when it names them. A class that changes more than the
reading is refused.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from lora_plugins.errors import InvalidSettings
from lora_plugins.vllm_patches.wrapping import wrap

_MODULE, _LOADS = "vllm.lora.worker_manager", "_load_adapter"  # vLLM's managers, and their method that reads an adapter


def patch(**options: Any) -> None:
    """Have every worker of this process make its manager of our class, with these options of its constructor."""
    from vllm.v1.worker import lora_model_runner_mixin

    import lora_plugins.worker.manager  # noqa: F401 - derives from vLLM's class, before another package replaces it

    mixin = lora_model_runner_mixin.LoRAModelRunnerMixin
    wrap(mixin, "load_lora_model", functools.partial(_load_lora_model, options=options))


def _load_lora_model(original: Any, self: Any, *args: Any, options: dict[str, Any], **kwargs: Any) -> Any:
    """Load the model while the mixin's name for the manager's class stands for a class of ours.

    vLLM then has the manager at `model_runner.lora_manager`.

    Touches:
        vllm.v1.worker.lora_model_runner_mixin: LRUCacheWorkerLoRAManager
            LoRAModelRunnerMixin.load_lora_model(self, model, vllm_config, device)
        vllm.lora.worker_manager: WorkerLoRAManager._load_adapter(self, lora_request)
    Why: the mixin makes its manager by this name, commands find it there, and frameworks put their own there.
    Until: vLLM lets a plugin choose the worker LoRA manager.
    """
    from vllm.v1.worker import lora_model_runner_mixin as module

    # Look the class up in each call: another package may put its own there after our plugins were loaded.
    found = module.LRUCacheWorkerLoRAManager
    module.LRUCacheWorkerLoRAManager = functools.partial(planned(found), **options)
    try:
        return original(self, *args, **kwargs)
    finally:
        module.LRUCacheWorkerLoRAManager = found


def planned(found: Any) -> type:
    """Return our class where `found` is vLLM's, else a class of ours that reads an adapter as `found` does.

    Raises:
        InvalidSettings: `found` changes more than the reading, which our class would leave out.
    """
    from lora_plugins.worker.manager import PlannedWorkerLoRAManager as Ours

    if not isinstance(found, type) or not hasattr(found, _LOADS):
        raise _not_planned(found, "no class that loads adapters as vLLM's does")
    if issubclass(found, Ours):
        return found
    bases = found.__mro__[:-1]  # without `object`
    theirs = [kind for kind in bases if kind.__module__ != _MODULE]
    changed = {name for kind in theirs for name in vars(kind) if not name.startswith("__")} - {_LOADS}
    if len(theirs) < len(bases):  # a subclass of vLLM's
        lost = changed & vars(Ours).keys() - {"create_lora_manager"}  # ours calls theirs
    else:  # a copy of vLLM's class has vLLM's names, and perhaps private helpers of its loading
        more = changed - _names_of_vllm()
        lost = {name for name in more if not name.startswith("_") or name in vars(Ours)}
    if lost:
        raise _not_planned(found, "which defines " + ", ".join(sorted(lost)) + " too")
    if found in Ours.__mro__:  # vLLM's own class
        return Ours
    # The method in the class's own body comes before the methods of both bases: `found` reads, ours does all else.
    return type(f"Planned{found.__name__}", (Ours, found), {_LOADS: getattr(found, _LOADS)})


def _names_of_vllm() -> set[str]:
    """Return the names that vLLM's own class defines or inherits."""
    # Load the module again: if another package's copy is in the place of vLLM's own class, no name may refer to the
    # original any more.
    spec: Any = importlib.util.find_spec(_MODULE)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return set(dir(module.LRUCacheWorkerLoRAManager))


def require_planned(manager: Any) -> Any:
    """Return the manager of a worker; called in every step, as another package may replace the manager at any time.

    Raises:
        InvalidSettings: the manager is missing, or takes no commands from the scheduler.
    """
    if manager is None:
        # Without this error, the commands would be dropped, and requests would wait for slots that nobody writes.
        raise InvalidSettings(
            "a worker with LoRA, but without a manager at model_runner.lora_manager",
            expected="a model runner with vLLM's LoRAModelRunnerMixin",
            remedy="serve with a tested release of vLLM, or leave lora_lru_manager out of VLLM_PLUGINS",
        )
    if not hasattr(manager, "begin_step"):
        raise _not_planned(type(manager), "put in the place of ours")
    return manager


def _not_planned(found: Any, what: str) -> InvalidSettings:
    name = f"{found.__module__}.{found.__qualname__}" if isinstance(found, type) else repr(found)
    return InvalidSettings(
        f"{name} as the workers' LoRA manager, {what}",
        expected=f"vLLM's, or a class that differs from it in {_LOADS} only",
        remedy="leave lora_lru_manager out of VLLM_PLUGINS, or have that class not be set",
    )
