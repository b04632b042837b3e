"""Looks up a module's rank or alpha by the patterns of `adapter_config.json`, within a budget of time.

Runs wherever weights are compared with their configuration, mostly in the reading process (`verification/`).
In go the patterns (`rank_pattern`, `alpha_pattern`) and a module's name; out comes the value of the first pattern that
matches, as in PEFT and vLLM.

The maker of an adapter writes the patterns, and vLLM runs the patterns inside the engine loop. The `regex` package
(which vLLM uses as well) can stop a slow match, so a pattern that would hang an engine is refused here. Compiling has
no time limit: counted repeats, each of which multiplies the compiled size, are counted before. A pattern that is slow
all the same ends only the reading process.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Generic, TypeVar

import regex

from lora_plugins.errors import InvalidAdapter

BUDGET_S = 1.0
# Compiling has no time limit, and takes longer for a longer pattern.
MAX_PATTERN_CHARACTERS = 10_000
MAX_REPEATS = 100_000  # `(?:a{100}){1000}`; no pattern for module names has more than a few `\d{1,3}`

# Names, perhaps with escaped dots, and alternatives of names.
_NAME = r"(?:[\w.-]|\\[.-])++"
_NAMES = regex.compile(rf"{_NAME}(?:\|{_NAME})*+")

_ESCAPE = regex.compile(r"\\(.)")
_BRACES = regex.compile(r"\{([^}]*)")

T = TypeVar("T")


class PatternBudget:
    """Time of this thread's processor for all matches of one adapter together, on a busy machine or not."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._ends = time.thread_time() + budget_s
        self._compiled: dict[str, Any] = {}

    def matches(self, pattern: str, name: str, *, field: str) -> bool:
        """Whether `pattern` matches the whole of `name`.

        Raises:
            InvalidAdapter: not a regular expression, too long, or out of time; the message has `field`.
        """
        if len(pattern) > MAX_PATTERN_CHARACTERS:
            raise _too_slow(f"of {len(pattern)} characters", field)
        if _repeats(pattern) > MAX_REPEATS:
            raise _too_slow(f"whose counted repeats multiply to more than {MAX_REPEATS}", field)
        try:
            compiled = self._compiled.get(pattern)
            if compiled is None:
                # regex's own cache would keep hostile patterns in the process, and charge an adapter for the patterns
                # of others.
                compiled = self._compiled[pattern] = regex.compile(pattern, cache_pattern=False)
            left_s = self._ends - time.thread_time()
            if left_s <= 0:
                raise TimeoutError
            return compiled.fullmatch(name, timeout=left_s) is not None
        except (TimeoutError, MemoryError) as error:  # a recursive pattern may exhaust the stack before the time
            raise _too_slow(f"that takes more than {self._budget_s:g} s or too much memory to match", field) from error
        except (regex.error, OverflowError, RecursionError, ValueError, KeyError, IndexError, TypeError) as error:
            raise InvalidAdapter(
                f"{pattern[:80]!r} in {field}, which is not a regular expression ({str(error)[:80]})",
                expected="module names or regular expressions",
                remedy=f"correct {field}",
            ) from None


def _too_slow(why: str, field: str) -> InvalidAdapter:
    return InvalidAdapter(
        f"a pattern in {field} {why}",
        expected=f"patterns of at most {MAX_PATTERN_CHARACTERS} characters, without nested repetition",
        remedy=f"write {field} with plain module names",
    )


def _repeats(pattern: str) -> int:
    """Return the product of all counts in braces, nested or not: readers of patterns may differ on nesting."""
    counts = []
    for braces in _BRACES.findall(pattern):
        numbers = (re.sub(r"\D", "", part).lstrip("0") for part in braces.split(","))
        # Ten digits say enough: Python refuses to read integers of more than 4,300 digits.
        counts.append(max((int(number[:10]) for number in numbers if number), default=1))
    return math.prod(max(1, count) for count in counts[:100]) if len(counts) <= 100 else MAX_REPEATS + 1


def _names_in(pattern: str) -> list[str]:
    """Return the names in a pattern of alternatives; none for any other pattern."""
    if _NAMES.fullmatch(pattern) is None:
        return []
    return [_ESCAPE.sub(r"\1", name) for name in pattern.split("|")]


class SuffixPatterns(Generic[T]):
    """Values by patterns; the first pattern that matches a module's name from its end, at a dot, decides.

    PEFT's `get_pattern_key`. A long list usually has an entry for every module, so plain names are looked up and not
    matched: the time depends on no machine's speed. Alternatives of names, `q_proj|v_proj`, and names with escapes are
    looked up too. A plain name's dots stand for dots here.
    """

    def __init__(self, patterns: Mapping[str, T], field: str, default: T) -> None:
        """Read the patterns; errors name `field` of the configuration. No pattern means the `default`."""
        self._field = field
        self._default = default
        self._plain: dict[str, tuple[int, T]] = {}
        self._others: list[tuple[int, str, T]] = []
        for place, (pattern, value) in enumerate(patterns.items()):
            names = _names_in(pattern)
            for name in names:
                self._plain.setdefault(name, (place, value))
            if not names:
                self._others.append((place, rf"(.*\.)?({pattern})", value))

    def value(self, module: str, budget: PatternBudget) -> T:
        """Return the value for a module.

        Raises:
            InvalidAdapter: see `PatternBudget.matches`.
        """
        parts = module.split(".")
        suffixes = (".".join(parts[start:]) for start in range(len(parts)))
        found = min(
            (self._plain[suffix] for suffix in suffixes if suffix in self._plain), key=itemgetter(0), default=None
        )
        for place, pattern, value in self._others:
            # Patterns keep their order: a plain name that matches earlier ends the search.
            if found is not None and place > found[0]:
                break
            if budget.matches(pattern, module, field=self._field):
                return value
        return self._default if found is None else found[1]
