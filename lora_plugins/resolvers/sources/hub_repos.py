"""Which repositories of the Hub are served: the entries of `VLLM_LORA_RESOLVER_HF_REPO_LIST`, without any I/O.

```
entry  = target [ "@" revision ]
target = org "/" repo                  the repository, its root and every folder below it
       | org "/" repo "/" folders      one folder of it, and those below
       | org "/*"                      every repository of an organisation
```
A name's first two segments are its repository, the others a folder in it: `org/repo/sql@v2` is `sql` at `v2`. Of the
entries that fit a name only the most specific ones decide: one that names the repository goes before `org/*`, and of
those the one with the longest folder. They pin where each of them has a revision: then no other revision is served.

Anybody can open a pull request, whose files lie in the same repository: what is neither a branch nor a tag
(`refs/pr/7`), or a commit that none of them reaches, is served only where an entry pins exactly that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, InvalidSettings

DEFAULT_REVISION = "main"

_VARIABLE = "VLLM_LORA_RESOLVER_HF_REPO_LIST"
_BRANCHES_AND_TAGS = ("refs/heads/", "refs/tags/")
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class HubTarget:
    """Where on the Hub a name points to.

    Attributes:
        explicit: whether an entry names the repository, not only its owner.
        is_pinned: whether an entry names this very revision.
    """

    repo: str
    subfolder: str
    revision: str
    explicit: bool
    is_pinned: bool = False

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class _Entry:
    org: str
    repo: str | None
    folders: tuple[str, ...]
    revision: str | None

    def fits(self, org: str, repo: str, folders: tuple[str, ...]) -> bool:
        return self.org == org and self.repo in (None, repo) and folders[: len(self.folders)] == self.folders

    @property
    def weight(self) -> tuple[bool, int]:
        return self.repo is not None, len(self.folders)

    def __str__(self) -> str:
        target = "/".join((self.org, self.repo or "*", *self.folders))
        return target if self.revision is None else f"{target}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubPatterns:
    """An allow-list of repositories."""

    entries: tuple[_Entry, ...]

    @classmethod
    def parse(cls, entries: str | Iterable[str]) -> HubPatterns:
        """Read a comma-separated list, or its entries.

        Raises:
            InvalidSettings: an entry is not in the grammar above.
        """
        parts = entries.split(",") if isinstance(entries, str) else entries
        return cls(tuple(_parse_entry(part.strip()) for part in parts))

    def match(self, name: AdapterName) -> HubTarget | None:
        """What an adapter name points to; None where the list does not have it."""
        if len(name.segments) < 2:
            return None
        org, repo, *rest = name.segments
        folders = tuple(rest)
        if not is_repo(f"{org}/{repo}"):
            return None
        fitting = [entry for entry in self.entries if entry.fits(org, repo, folders)]
        if not fitting:
            return None
        weight = max(entry.weight for entry in fitting)
        deciding = [entry for entry in fitting if entry.weight == weight]
        pins = [entry.revision for entry in deciding if entry.revision is not None]
        revision = name.revision or deciding[0].revision or DEFAULT_REVISION
        is_pinned = revision in pins
        if not is_pinned and (len(pins) == len(deciding) or is_foreign(revision)):
            return None
        return HubTarget(f"{org}/{repo}", "/".join(folders), revision, explicit=weight[0], is_pinned=is_pinned)

    def why_not(self, name: AdapterName) -> str:
        """Why `match` answers None, for people."""
        if len(name.segments) < 2:
            return "a name on the Hub has an owner and a repository: org/repo"
        org, repo, *folders = name.segments
        if not is_repo(f"{org}/{repo}"):
            return f"no repository of the Hub can be called '{org}/{repo}'"
        if any(entry.fits(org, repo, tuple(folders)) for entry in self.entries):
            if name.revision is not None and is_foreign(name.revision):
                return f"'{name.revision}' is no branch or tag, and {_VARIABLE} does not pin it ({self})"
            return f"{_VARIABLE} pins it to another revision ({self})"
        return f"{_VARIABLE} does not name it ({self})"

    def repos(self) -> list[HubTarget | str]:
        """The repositories, or folders of them, that entries name; the entry itself where it names no repository."""
        return [
            str(entry)
            if entry.repo is None
            else HubTarget(
                f"{entry.org}/{entry.repo}",
                "/".join(entry.folders),
                entry.revision or DEFAULT_REVISION,
                explicit=True,
                is_pinned=entry.revision is not None,
            )
            for entry in self.entries
        ]

    def __str__(self) -> str:
        return ", ".join(str(entry) for entry in self.entries)


@dataclass(frozen=True, slots=True)
class AnyRepo:
    """Every repository, for names that are the paths of allowed URIs; `explicit` and `is_pinned` as in `HubTarget`."""

    explicit: bool
    is_pinned: bool = False

    def match(self, name: AdapterName) -> HubTarget:
        """What `org/repo/folder@revision` points to; whether the revision is allowed, has been checked."""
        org, repo, *folders = name.segments
        revision = name.revision or DEFAULT_REVISION
        return HubTarget(f"{org}/{repo}", "/".join(folders), revision, self.explicit, self.is_pinned)

    def why_not(self, name: AdapterName) -> str:  # noqa: ARG002 - as of `HubPatterns`
        """Nothing: every name is a repository's."""
        return ""

    def repos(self) -> list[HubTarget | str]:
        """None: nothing is named."""
        return []

    def __str__(self) -> str:
        return "allowed URIs"


def is_foreign(revision: str) -> bool:
    """Whether a revision's own spelling says that it is neither a branch nor a tag: `refs/pr/7`, `refs/convert/…`."""
    return revision.startswith("refs/") and not revision.startswith(_BRANCHES_AND_TAGS)


def is_repo(text: str) -> bool:
    """Whether `text` can be a repository with its owner, by the Hub's own rules."""
    parts = text.split("/")
    return (
        len(parts) == 2
        and all(_PART.fullmatch(part) is not None for part in parts)
        and "--" not in text
        and ".." not in text
        and not text.endswith(".git")
    )


def _parse_entry(text: str) -> _Entry:
    try:
        name = AdapterName.parse(text)
    except AdapterNotFound as error:
        raise _malformed(text, error.found) from None
    if len(name.segments) < 2:
        raise _malformed(text, "no owner")
    org, repo, *folders = name.segments
    if repo == "*" and is_repo(f"{org}/any"):
        if folders:
            raise _malformed(text, "a folder of every repository")
        return _Entry(org, None, (), name.revision)
    if not is_repo(f"{org}/{repo}"):
        raise _malformed(text, "no repository that the Hub can have")
    if any("*" in folder for folder in folders):
        raise _malformed(text, "a pattern of folders")
    return _Entry(org, repo, tuple(folders), name.revision)


def _malformed(entry: str, found: str) -> InvalidSettings:
    return InvalidSettings(
        f"{found} in the entry '{entry}' of {_VARIABLE}",
        expected="org/repo, org/repo/folder or org/*, each with @revision or without",
        remedy=f"correct {_VARIABLE}",
    )
