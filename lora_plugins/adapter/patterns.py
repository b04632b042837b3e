"""Module-name patterns of `adapter_config.json`, matched as PEFT and vLLM match them, but under a deadline.

The patterns are regular expressions written by whoever made the adapter, and vLLM runs them inside the engine loop.
The `regex` package (which vLLM uses as well) can stop a match that takes too long, so what would hang an engine is
refused here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar

import regex

from lora_plugins.errors import InvalidAdapter

BUDGET_S = 1.0
MAX_PATTERN_CHARACTERS = 10_000  # compiling is under no deadline, and takes longer the longer the pattern

T = TypeVar("T")


class Deadline:
    """Time of this thread's processor that all matches for one adapter may take together, busy machine or not."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._ends = time.thread_time() + budget_s
        self._compiled: dict[str, Any] = {}

    def matches(self, pattern: str, name: str, *, field: str) -> bool:
        """Whether `pattern` matches the whole of `name`.

        Raises:
            InvalidAdapter: not a regular expression, too long, or out of time; `field` names it in the message.
        """
        if len(pattern) > MAX_PATTERN_CHARACTERS:
            raise InvalidAdapter(
                f"a pattern of {len(pattern)} characters in {field}",
                expected=f"at most {MAX_PATTERN_CHARACTERS}",
                remedy=f"write {field} with plain module names",
            )
        try:
            compiled = self._compiled.get(pattern)
            if compiled is None:
                compiled = self._compiled[pattern] = regex.compile(pattern, cache_pattern=False)
            left_s = self._ends - time.thread_time()
            if left_s <= 0:
                raise TimeoutError
            return compiled.fullmatch(name, timeout=left_s) is not None
        except (TimeoutError, MemoryError):  # a recursive pattern runs out of stack before it runs out of time
            raise InvalidAdapter(
                f"a pattern in {field} that takes more than {self._budget_s:g} s or too much memory to match",
                expected="patterns without nested repetition",
                remedy=f"write {field} with plain module names",
            ) from None
        except (regex.error, OverflowError, RecursionError, ValueError, KeyError, IndexError, TypeError) as error:
            raise InvalidAdapter(
                f"{pattern[:80]!r} in {field}, which is not a regular expression ({str(error)[:80]})",
                expected="module names or regular expressions",
                remedy=f"correct {field}",
            ) from None


def first_match(patterns: Mapping[str, T], module: str, deadline: Deadline, *, field: str) -> T | None:
    """The value of the first pattern that is a suffix of `module` at a dot (PEFT's `get_pattern_key`)."""
    for pattern, value in patterns.items():
        if deadline.matches(rf"(.*\.)?({pattern})", module, field=field):
            return value
    return None
