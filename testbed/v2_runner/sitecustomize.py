"""Python imports this module at the start of every process that has its folder on PYTHONPATH: see the package.

- `vllm/triton_utils/importing.py` (0.32) takes Triton for usable on a CPU build where `triton.backends` knows a backend
  `cpu`. The stand-in compiles nothing, and is never active: Triton's interpreter needs no driver.
- `CpuPlatform.check_and_update_config` (vllm/platforms/cpu.py, 0.32) switches asynchronous scheduling off, as "not
  required on CPU". Here the choice of vLLM's configuration stays, which is the choice on CUDA.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from triton import backends

_PLATFORM = "vllm.platforms.cpu"


class _AfterImport:
    """Finds the module of vLLM's CPU platform as Python would, and changes the class after the import."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != _PLATFORM:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), _keep_choice(module))[0]  # type: ignore[method-assign]
        return spec


def _keep_choice(module: ModuleType) -> None:
    original = module.CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen
        print(f"v2_runner: asynchronous scheduling is {chosen}", flush=True)

    module.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: False))
sys.meta_path.insert(0, _AfterImport())  # type: ignore[arg-type]
