"""Patterns of adapter names: `*` stands for any characters, slashes included, `?` for one, everything else for itself.

A pattern without `@` says nothing of revisions: `team-a/sql` covers `team-a/sql@v2`. One with `@` is compared
with the whole name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamePattern:
    """One pattern; must not be empty."""

    text: str

    @property
    def is_plain(self) -> bool:
        """Whether it is one name, with each of its revisions or one of them."""
        return "*" not in self.text and "?" not in self.text

    def matches(self, name: str) -> bool:
        """Whether it covers this name; upper and lower case differ. Takes time in proportion to both lengths."""
        return _fits(self.text, name if "@" in self.text else name.partition("@")[0])


def _fits(pattern: str, text: str) -> bool:
    """Match without ever going back further than to the last star, so that no pattern and name take long."""
    at, of = 0, 0  # in text, in pattern
    star, resume = -1, 0
    while at < len(text):
        if of < len(pattern) and pattern[of] == "*":
            star, resume = of, at
            of += 1
        elif of < len(pattern) and pattern[of] in ("?", text[at]):
            at, of = at + 1, of + 1
        elif star >= 0:
            resume += 1
            at, of = resume, star + 1
        else:
            return False
    return not pattern[of:].strip("*")
