"""Our settings reach the processes that vLLM starts by Ray.

vLLM copies its own variables to its Ray actors, and those that VLLM_RAY_EXTRA_ENV_VARS_TO_COPY names
(vllm/ray/ray_env.py, 0.30 to 0.33). It is read when the actors are made, after the plugins were loaded.
"""

from __future__ import annotations

from lora_plugins.ledger import Patch
from lora_plugins.settings import environment, set_for_children, variables_of_this_process

_COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def name_our_variables() -> None:
    """Add what is set of our settings, and of the object stores' own, to what vLLM copies; a user's names stay."""
    named = [name.strip() for name in environment().get(_COPIED, "").split(",") if name.strip()]
    missing = [name for name in variables_of_this_process() if name not in named]
    if missing:
        set_for_children(_COPIED, ",".join([*named, *missing]))


LEDGER = (
    Patch(
        "vllm.ray.ray_env: get_env_vars_to_copy(exclude_vars, additional_vars, destination)",
        what="given our variables, by the environment variable that it reads",
        why="engines of data parallelism by Ray, and the workers on their nodes, get vLLM's variables only",
        remove="vLLM copies the whole environment to engines as well, as its second Ray executor does to workers",
    ),
)
