"""Patterns of adapter names: `*` matches any characters, also slashes, `?` one character; others match themselves.

A pattern without `@` matches every revision: `team-a/sql` covers `team-a/sql@v2`. A pattern with `@` is compared with
the whole name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamePattern:
    """One pattern; must not be empty."""

    text: str

    @property
    def is_plain(self) -> bool:
        """Whether the pattern covers a single name, with all revisions or a single revision."""
        return "*" not in self.text and "?" not in self.text

    def matches(self, name: str) -> bool:
        """Whether the pattern covers this name, case-sensitively. Takes time in proportion to both lengths."""
        return _fits(self.text, name if "@" in self.text else name.partition("@")[0])


def _fits(pattern: str, text: str) -> bool:
    """Match without going back beyond the last star, so that no pattern takes exponential time."""
    at, of = 0, 0  # in text, in pattern
    star, resume = -1, 0
    while at < len(text):
        if of < len(pattern) and pattern[of] == "*":
            star, resume = of, at
            of += 1
        elif of < len(pattern) and pattern[of] in ("?", text[at]):
            at, of = at + 1, of + 1
        # A mismatch after a star: let the star take one more character.
        elif star >= 0:
            resume += 1
            at, of = resume, star + 1
        else:
            return False
    return not pattern[of:].strip("*")
