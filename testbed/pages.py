"""The fenced blocks of a Markdown page, in the order in which a reader meets them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

_FENCED = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_PROMPT = "$ "


@dataclass(frozen=True)
class Block:
    """What stands between two fences: its language, its text, and the line of the page where it begins."""

    language: str
    text: str
    line: int

    @property
    def first(self) -> str:
        """Its first line, by which people and tests name it."""
        return self.text.partition("\n")[0].strip()

    def commands(self) -> str:
        """What a reader types: all of it, or what stands behind the prompts of a console."""
        return self._lines(typed=True) if self.language == "console" else self.text

    def shown(self) -> str:
        """The output that the page shows below the prompts of a console."""
        return self._lines(typed=False) if self.language == "console" else ""

    def _lines(self, *, typed: bool) -> str:
        """A console's lines behind prompts, and those that continue them; or all others."""
        chosen, goes_on = "", False
        for line in self.text.splitlines(keepends=True):
            is_typed = goes_on or line.startswith(_PROMPT)
            goes_on = is_typed and line.endswith("\\\n")
            if is_typed == typed:
                chosen += line.removeprefix(_PROMPT)
        return chosen


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page's text."""
    return [
        Block(found["language"], textwrap.dedent(found["text"]), page.count("\n", 0, found.start()) + 2)
        for found in _FENCED.finditer(page)
    ]
