"""How every patch puts a function of ours around a function of vLLM, once, and keeps our state on vLLM's objects.

`patch` functions of the other files call `wrap` as vLLM loads our plugins, in each process of a server. A file has a
function of ours for each wrapped function of vLLM, under the same name with an underscore before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from lora_plugins.errors import InvalidSettings

T = TypeVar("T")
_OURS = "lora_plugins_wrapper"  # marks the function, whatever else wraps it

signature_of = functools.cache(inspect.signature)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any], *, only: Callable[[Any], bool] | None = None) -> None:
    """Put `around(original, wrapper)` in the place of an attribute of a class or module; again, nothing changes.

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
        wrapped = functools.wraps(original)(around(original, wrapper, only=only))
        setattr(wrapped, _OURS, True)
        # The original of a class method is bound already.
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)
        setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def around(
    original: Callable[..., Any], wrapper: Callable[..., Any], *, only: Callable[[Any], bool] | None = None
) -> Callable[..., Any]:
    """Return a function that passes `original` and its own arguments on to `wrapper`.

    Of a method, `only` is asked for the object: where the answer is false, the original runs as if it were not wrapped.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if only is None or only(args[0]):
            return wrapper(original, *args, **kwargs)
        return original(*args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    # Starlette runs a handler of errors in a thread, unless the handler is a coroutine function.
    return call_async if inspect.iscoroutinefunction(wrapper) else call


def ours(owner: Any, name: str, make: Callable[[], T]) -> T:
    """Return our object at the attribute `name` of an object of vLLM's, made at the first call; both end together."""
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
