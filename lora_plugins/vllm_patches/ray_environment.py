"""Our settings reach the processes that vLLM starts by Ray, but for settings that only an API server needs.

vLLM copies its own variables to its Ray actors, and the variables that VLLM_RAY_EXTRA_ENV_VARS_TO_COPY names
(vllm/ray/ray_env.py, 0.30 to 0.33). vLLM reads the list when it makes the actors, after the plugins were loaded. vLLM's
second Ray executor copies the whole environment to its workers. Ray shows its actors' variables to everybody who sees
the dashboard.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.settings import OF_API_SERVERS, environment, set_for_children, variables_of_workers
from lora_plugins.vllm_patches.wrapping import wrap

_COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def patch() -> None:
    """Have processes that Ray starts get the workers' variables, and no others; a second call changes nothing."""
    from vllm.v1.executor import ray_env_utils

    _name_our_variables()
    wrap(ray_env_utils, "get_driver_env_vars", _get_driver_env_vars)


def _name_our_variables() -> None:
    """Add the workers' variables to vLLM's list; a user's names stay, but for secrets of API servers.

    Touches: vllm.ray.ray_env: get_env_vars_to_copy(exclude_vars, additional_vars, destination)
    Why: engines of data parallelism by Ray, and the workers on their nodes, get vLLM's variables only.
    Until: vLLM copies the whole environment to engines as well, as its second Ray executor does to workers.
    """
    named = [name.strip() for name in environment().get(_COPIED, "").split(",") if name.strip()]
    kept = [name for name in named if name not in OF_API_SERVERS]
    missing = [name for name in variables_of_workers() if name not in kept]
    # Set only if changed: vLLM starts processes with this environment, and each calls the plugins again.
    if missing or kept != named:
        set_for_children(_COPIED, ",".join([*kept, *missing]))


def _get_driver_env_vars(original: Any, worker_specific_vars: set[str]) -> Any:
    """Leave out the admin key, and where policy and declared set lie.

    Why: vLLM copies the whole environment to the workers, and Ray shows all variables that Ray is given.
    Until: vLLM copies only what its workers read.
    """
    return original(worker_specific_vars | OF_API_SERVERS)
