"""Wraps functions of vLLM: once, however often a plugin asks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from lora_plugins.errors import InvalidSettings

T = TypeVar("T")
_OURS = "lora_plugins_wrapper"  # marks the function, whatever else wraps it


def wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Put `wrapper(original)` in the place of an attribute of a class or module; a second call changes nothing.

    Raises:
        InvalidSettings: this vLLM has no such attribute, although its release is known.
    """
    original = getattr(owner, name, None)
    if original is None:
        raise InvalidSettings(
            f"a vLLM without {owner.__name__}.{name}",
            expected="the places of our ledger",
            remedy="install an unchanged vLLM that lora-plugins supports; lora-plugins doctor names what differs",
        )
    if not hasattr(original, _OURS):
        # `wraps` copies `__dict__` too: a wrapper of another package around ours still has the mark.
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, _OURS, True)
        # The original of a class method is bound already.
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)
        setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def where(is_ours: Callable[[Any], bool], method: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a wrapper for `wrap`: `method(original, self, ...)` answers for `is_ours` objects, else vLLM's method."""

    def wrapper(original: Any) -> Any:
        def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(original, self, *args, **kwargs) if is_ours(self) else original(self, *args, **kwargs)

        return answer

    return wrapper


def ours(owner: Any, name: str, make: Callable[[], T]) -> T:
    """Return what an object of vLLM's has of ours under a name, made at the first call; both end together."""
    if name not in vars(owner):
        setattr(owner, name, make())
    found: T = vars(owner)[name]
    return found


class Over:
    """An object of vLLM's, but for the attributes that a subclass has."""

    def __init__(self, under: Any) -> None:
        self._under = under

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)
