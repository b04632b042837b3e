"""One wrapper for each attribute, however often it is asked for."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.vllm_patches.wrapping import wrap


def louder(original: Callable[[Any, str], str], self: Any, text: str) -> str:
    return original(self, text) + "!"


class Speaker:
    def say(self, text: str) -> str:
        """As vLLM's."""
        return text


def test_again_nothing_changes() -> None:
    kind = type("Kind", (), {"say": Speaker.say})
    for _ in range(2):
        wrap(kind, "say", louder)
    assert kind().say("x") == "x!"
    assert (kind.say.__name__, kind.say.__doc__) == ("say", "As vLLM's.")


def test_another_packages_wrapper_around_ours_is_kept() -> None:
    kind = type("Kind", (), {"say": Speaker.say})
    wrap(kind, "say", louder)
    ours = kind.say

    @functools.wraps(ours)
    def theirs(self: Any, text: str) -> str:
        return f"({ours(self, text)})"

    kind.say = theirs
    wrap(kind, "say", louder)
    assert kind().say("x") == "(x!)"


def test_a_place_that_vllm_lacks_is_named() -> None:
    with pytest.raises(InvalidSettings, match=r"a vLLM without Speaker\.shout.*doctor"):
        wrap(Speaker, "shout", louder)
    assert not hasattr(Speaker, "shout")


def test_objects_that_are_not_ours_keep_vllms_method() -> None:
    kind = type("Kind", (), {"say": Speaker.say, "is_loud": True})
    wrap(kind, "say", louder, only=lambda one: one.is_loud)
    loud, quiet = kind(), kind()
    quiet.is_loud = False
    assert (loud.say("x"), quiet.say(text="x")) == ("x!", "x")


def test_a_coroutine_function_stays_one() -> None:
    async def say(self: Any) -> str:
        return "x"

    async def wrapper(original: Any, self: Any) -> str:
        return f"{await original(self)}!"

    kind = type("Kind", (), {"say": say})
    wrap(kind, "say", wrapper)
    assert inspect.iscoroutinefunction(kind.say)
    assert asyncio.run(kind().say()) == "x!"
