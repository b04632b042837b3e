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
        if self.language != "console":
            return self.text
        typed = [line.removeprefix(_PROMPT) for line in self.text.splitlines() if line.startswith(_PROMPT)]
        return "".join(f"{line}\n" for line in typed)

    def shown(self) -> str:
        """The output that the page shows below the prompts of a console."""
        lines = self.text.splitlines() if self.language == "console" else []
        return "".join(f"{line}\n" for line in lines if not line.startswith(_PROMPT))


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page's text."""
    return [
        Block(found["language"], textwrap.dedent(found["text"]), page.count("\n", 0, found.start()) + 2)
        for found in _FENCED.finditer(page)
    ]
