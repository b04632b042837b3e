"""With an access policy, a stored response (`VLLM_ENABLE_RESPONSES_API_STORE`) is that of its own key alone.

A body may choose its response's id. So another key could read, continue, cancel and replace what it could guess.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from lora_plugins.api.access.principals import label_of_request
from lora_plugins.vllm_patches.wrapping import wrap

_STORES = ("response_store", "msg_store", "event_store", "background_tasks")


def patch_stores() -> None:
    """Give each principal of this process ids of its own; a second call changes nothing."""
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    wrap(OpenAIServingResponses, "__init__", _making)


def _making(original: Any) -> Any:
    """Make the stores mappings with a part for each principal.

    Touches:
        vllm.entrypoints.openai.responses.serving:
            OpenAIServingResponses{response_store, msg_store, event_store, background_tasks,
                __init__(self, engine_client, models, ...)}
    Why: ids are the callers' choice, so keys could read, continue, cancel and replace others' responses.
    Until: vLLM keeps stored responses apart by key.
    """

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name in _STORES:
            setattr(self, name, _OfThePrincipal())

    return made


class _OfThePrincipal(MutableMapping[str, Any]):
    """What the present request's principal has put there; tasks that a request starts are of its principal too."""

    def __init__(self) -> None:
        self._of: dict[str | None, dict[str, Any]] = {}

    def _own(self) -> dict[str, Any]:
        return self._of.setdefault(label_of_request(), {})

    def __getitem__(self, it: str) -> Any:
        return self._own()[it]

    def __setitem__(self, it: str, value: Any) -> None:
        self._own()[it] = value

    def __delitem__(self, it: str) -> None:
        del self._own()[it]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())
