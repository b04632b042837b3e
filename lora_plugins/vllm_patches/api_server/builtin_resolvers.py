"""vLLM's own resolvers of the same plugin names: ours run in their place, whichever entry point is discovered last."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from lora_plugins.ledger import Patch
from lora_plugins.log import logger

_BUILTIN = "lora_plugins_builtin"  # of our function: the one whose place it has


def take_over(module_name: str, function_name: str, register: Callable[[], None]) -> None:
    """Put `register` in the place of vLLM's builtin of the same entry-point name.

    vLLM imports both entry points and keeps the one that it discovered last. If that is the builtin, it is read
    from its module after this has run; if it is ours, nothing else is needed. So ours runs in either order. A vLLM
    that has no such builtin is refused when ours runs, or has nothing to take over.
    """
    try:
        setattr(register, _BUILTIN, builtin(module_name, function_name))
        setattr(importlib.import_module(module_name), function_name, register)
    except (ImportError, AttributeError):
        logger.debug("vLLM has no %s:%s to take over", module_name, function_name)


def builtin(module_name: str, function_name: str) -> Callable[[], None]:
    """The function of vLLM behind an entry point, taken over or not.

    Raises:
        ImportError, AttributeError: this vLLM has none.
    """
    function: Callable[[], None] = getattr(importlib.import_module(module_name), function_name)
    return getattr(function, _BUILTIN, function)


LEDGER = (
    Patch(
        """
        vllm.plugins.lora_resolvers.filesystem_resolver: register_filesystem_resolver()
        vllm.plugins.lora_resolvers.hf_hub_resolver: register_hf_hub_resolver()
        """,
        what="replaced by our function of the same entry-point name, when VLLM_PLUGINS names it",
        why="vLLM ships entry points of these names, and of several with one name it keeps the last discovered",
        remove="vLLM lets a user choose among entry points of one name",
    ),
)
