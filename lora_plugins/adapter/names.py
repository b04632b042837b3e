"""The grammar of adapter names: an adapter has exactly one name, and a name can never leave its root.

Pure functions of texts, called in the API server and on the command line. `AdapterName.parse` reads a name as a request
spells the name; `why_absent`, `with_base_name` and `misspelt` return the error for a name that no source has; `near`
finds similar names.

```
name     = mixture / path [ "@" revision ]   at most 256 characters; mixtures: `mixture.py`
path     = segment *( "/" segment )
revision = segment *( "/" segment )     no further "@"
segment  = 1 to 255 UTF-8 bytes, not led by "." or "-", no space at either end
```
A segment holds letters, digits, marks, punctuation, symbols and inner spaces, in Unicode's composed form (NFC).
Backslashes, control, formatting (bidirectional, zero-width), unassigned and invisible characters are refused.
Percent-encoding is not decoded: `%2e` is three characters like any others.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from lora_plugins.adapter.mixture import fault_in, terms_of
from lora_plugins.errors import AdapterNotFound, InvalidAdapter

MAX_CHARACTERS = 256
MAX_SEGMENT_BYTES = 255
MIN_PREFIX = 8  # least characters of a digest that may stand for the digest
HEXADECIMAL = frozenset("0123456789abcdef")
MISSPELT = "no adapter of this name"  # `found` of errors for a name that a near name may explain

# Letters and marks by category that are drawn as nothing at all.
_INVISIBLE = frozenset(
    {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}
)


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A well-formed adapter name, split into its path and its pinned revision, if any.

    The path of a mixture is its canonical text, with the revisions of its parts.
    """

    path: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> AdapterName:
        """Read a name as a request spells it.

        Raises:
            AdapterNotFound: `text` is no name in this grammar, so no adapter can have it.
        """
        if len(text) > MAX_CHARACTERS:
            raise _malformed(f"a name of {len(text)} characters", f"at most {MAX_CHARACTERS}")
        # A composed and a decomposed name look alike, and would be two adapters.
        if not unicodedata.is_normalized("NFC", text):
            raise _malformed("a name in decomposed Unicode", "Unicode's composed form (NFC)")
        if (terms := terms_of(text)) is not None:
            if not terms:
                raise _malformed(*fault_in(text))
            return cls("+".join(f"{cls.parse(term.name)}*{term.weight}" for term in terms))
        path, at, revision = text.partition("@")
        if not path:
            raise _malformed("nothing before '@'" if at else "an empty name", "an adapter's name")
        if at and not revision:
            raise _malformed("nothing after '@'", f"a revision there, or '{path}' alone")
        if "@" in revision:
            raise _malformed("more than one '@'", "one revision at most")
        for segment in (*path.split("/"), *(revision.split("/") if at else ())):
            _check_segment(segment)
        return cls(path, revision if at else None)

    @property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.path.split("/"))

    def __str__(self) -> str:
        return self.path if self.revision is None else f"{self.path}@{self.revision}"


def why_absent(text: str) -> AdapterNotFound | None:
    """Return the fault in a name that no source has, where the name itself shows a fault; otherwise None."""
    try:
        name = AdapterName.parse(text)
    except AdapterNotFound as error:
        error.adapter = text
        return error
    if terms_of(text) is None and "*" in text:
        expected = "the name of an adapter, or a mixture, each of whose parts has a weight: NAME*0.7+NAME*-0.3"
        return AdapterNotFound(MISSPELT, expected=expected, remedy="correct the name", adapter=text)
    if name.revision is None:
        return None
    if is_prefix(name.revision):
        return AdapterNotFound(
            f"no revision or version '{name.revision}' of an adapter '{name.path}'",
            expected="a revision that a source has, or the digest of a version that the name has had and the store has",
            remedy=f"push or load the version again, or ask for '{name.path}'",
            adapter=text,
        )
    return AdapterNotFound(
        f"no revision '{name.revision}' of an adapter '{name.path}'",
        expected="a revision after '@', which no adapter's own name can hold",
        remedy="correct the revision, or rename the adapter where '@' belongs to its name",
        adapter=text,
    )


def with_base_name(text: str, base_names: Iterable[str]) -> AdapterNotFound | None:
    """Return the error for `BASE:sql` and the like, as other servers name adapters; None for other names."""
    for base in base_names:
        if text.startswith(base) and len(text) > len(base) + 1 and text[len(base)] in ":_/@+-":
            rest = text[len(base) + 1 :]
            return AdapterNotFound(
                f"the base model's name '{base}' before a name",
                expected="the adapter's own name",
                remedy=f'ask for "model": "{rest}", if that is the adapter',
                adapter=text,
            )
    return None


def near(text: str, names: Iterable[str]) -> list[str]:
    """Return the `names` nearest to one that nobody has, three at most.

    Near are names that differ in one place, by two characters at most, letter case and `_` for `-` aside: a pass over
    1,000 names takes a few milliseconds at most, where difflib needs ten times as long. Nearest is the text without its
    first segment or its `:tag`, as clients of other servers write names (`openai/sql`, `sql:latest`).
    """
    folded = _folded(text)
    untagged = folded.rpartition(":")[0] or folded
    bare = {untagged, *(it.partition("/")[2] for it in (folded, untagged))}
    compared = ((name, _folded(name)) for name in names)
    found = [(-alike, name) for name, it in compared if (alike := MAX_CHARACTERS * (it in bare) or _alike(folded, it))]
    return [name for _, name in heapq.nsmallest(3, found)]


def misspelt(text: str, names: Iterable[str]) -> AdapterNotFound | None:
    """Return the error for a name that nobody has, beside near `names`; None where there are none."""
    quoted = [f"'{name}'" for name in names]
    if not quoted:
        return None
    return AdapterNotFound(
        MISSPELT,
        expected=f"a name like {' or '.join(quoted)}",
        remedy="correct the name; see /v1/models",
        adapter=text,
    )


def _folded(text: str) -> str:
    return text.casefold().replace("_", "-")


def _alike(text: str, other: str) -> int:
    """Return how many characters two texts share at their ends, or 0 where more than two in one place differ."""
    shorter, longer = sorted((text, other), key=len)
    least = len(longer) - 2
    half = least // 2
    # One of the halves is whole where one place differs: a cheap look that passes over nearly all names.
    if len(shorter) < max(least, 2) or (shorter[:half] != longer[:half] and shorter[-half:] != longer[-half:]):
        return 0
    head = len(os.path.commonprefix([shorter, longer]))  # noqa: RUF071 - characters are compared
    tail = len(os.path.commonprefix([shorter[head:][::-1], longer[head:][::-1]]))  # noqa: RUF071
    return head + tail if head + tail >= max(least, 2) else 0


def covering(text: str) -> set[str]:
    """Return the names whose block is one of `text` too: without its revision, and of a mixture its parts."""
    names = [term.name for term in terms_of(text) or ()] or [text]
    return {text, *names, *(name.partition("@")[0] for name in names)}


def refuse_mixture(name: str) -> None:
    """Refuse the name of a mixture for an adapter's own files.

    Raises:
        InvalidAdapter: a request for this name would mean the mixture.
    """
    if terms_of(name) is not None:
        expected, remedy = "a name that does not end in '*' and a number", "choose another name, or change the parts"
        raise InvalidAdapter("the name of a mixture", expected=expected, remedy=remedy, adapter=name)


def is_prefix(text: str) -> bool:
    """Return whether `text` may be the beginning of a version's digest: 8 to 64 hexadecimal characters."""
    return MIN_PREFIX <= len(text) <= 64 and HEXADECIMAL.issuperset(text)


def is_by_digest(name: str, digest: str) -> bool:
    """Whether a name is `NAME@DIGEST`, with a beginning of this digest: a version of another name."""
    prefix = name.partition("@")[2]
    return is_prefix(prefix) and digest.startswith(prefix)


def adapter_id(name: str) -> int:
    """Return a number for a name, the same on every replica and after every restart: 1 to 2**31 - 1."""
    # Not `hash()`: Python salts string hashes in each process.
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") % (2**31 - 1) + 1


def _check_segment(segment: str) -> None:
    if not segment:
        raise _malformed("an empty segment", "no leading, trailing or double slash")
    # A file system hides names with a leading dot (and has `..`), and commands take a leading dash for an option.
    if segment[0] in ".-":
        raise _malformed(
            f"the segment '{segment}', led by '{segment[0]}'", "segments that start with another character"
        )
    if segment[0] == " " or segment[-1] == " ":
        raise _malformed("a space at the end of a segment", "spaces inside segments only")
    for character in segment:
        if not _allowed(character):
            raise _malformed(f"the character U+{ord(character):04X}", "visible characters, and no backslash")
    if len(segment.encode()) > MAX_SEGMENT_BYTES:
        raise _malformed("a segment too long for a file name", f"at most {MAX_SEGMENT_BYTES} bytes of UTF-8")


def _allowed(character: str) -> bool:
    if character == "\\" or ord(character) in _INVISIBLE:
        return False
    # C*: control, format, surrogate, private, unassigned. Z*: spaces and separators.
    return character == " " or unicodedata.category(character)[0] not in "CZ"


def _malformed(found: str, expected: str) -> AdapterNotFound:
    return AdapterNotFound(
        f"a name that no adapter can have: {found}",
        expected=expected,
        remedy="ask for the adapter by its path below the root; rename it where its path is no name",
    )
