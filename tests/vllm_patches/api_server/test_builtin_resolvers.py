"""Our resolvers under the names of vLLM's builtin ones."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from lora_plugins.vllm_patches.api_server import builtin_resolvers


@pytest.fixture
def module(monkeypatch):
    module = ModuleType("a_builtin_of_vllm")
    module.register = lambda: "builtin"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_builtin_that_was_taken_over_can_still_be_called(module):
    assert builtin_resolvers.builtin(module.__name__, "register")() == "builtin"
    builtin_resolvers.take_over(module.__name__, "register", lambda: "ours")
    assert module.register() == "ours"
    assert builtin_resolvers.builtin(module.__name__, "register")() == "builtin"


def test_taken_over_twice_the_builtin_is_still_the_builtin(module):
    for _ in range(2):
        builtin_resolvers.take_over(module.__name__, "register", lambda: "ours")
    assert builtin_resolvers.builtin(module.__name__, "register")() == "builtin"
