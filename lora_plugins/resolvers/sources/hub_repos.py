"""The served repositories of the Hub: entries of `VLLM_LORA_RESOLVER_HF_REPO_LIST`, without any I/O.

Used by `hub.py` for each look-up: in goes an adapter's name; out come the repository, folder and revision to ask for,
or the reason for which no entry allows the name.

```
entry  = target [ "@" revision ]
target = org "/" repo                  the repository, its root and every folder below it
       | org "/" repo "/" folders      one folder of it, and those below
       | org "/*"                      every repository of an organisation
```
A name's first two segments are its repository, further segments a folder inside: `org/repo/sql@v2` is `sql` at `v2`.
Only the most specific entries that fit a name decide: an entry that names the repository goes before `org/*`, and among
entries of the repository the longest folder. Where each of the deciding entries has a revision, the entries pin: no
other revision is served.

Anybody can open a pull request, whose files lie in the same repository: a revision that is neither branch nor tag
(`refs/pr/7`), or a commit that no branch or tag reaches, is served only where an entry pins exactly the revision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, InvalidSettings
from lora_plugins.resolvers.sources.templates import DEFAULT_REVISION
from lora_plugins.resolvers.sources.uri import SourceUri, is_foreign, is_repo

_VARIABLE = "VLLM_LORA_RESOLVER_HF_REPO_LIST"


@dataclass(frozen=True, slots=True)
class HubTarget:
    """The place on the Hub that a name stands for.

    Attributes:
        uri: of the repository or the folder inside, without a revision.
        explicit: whether an entry names the repository, not only its owner.
        is_pinned: whether an entry names exactly this revision.
    """

    uri: SourceUri
    revision: str
    explicit: bool
    is_pinned: bool = False

    def __str__(self) -> str:
        return f"{self.uri.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubPatterns:
    """An allow-list of repositories; an entry without a path stands for all repositories of an owner."""

    entries: tuple[SourceUri, ...]

    @classmethod
    def parse(cls, entries: str | Iterable[str]) -> HubPatterns:
        """Read a comma-separated list, or its entries.

        Raises:
            InvalidSettings: an entry is not in the grammar above.
        """
        parts = entries.split(",") if isinstance(entries, str) else entries
        return cls(tuple(_parse_entry(part.strip()) for part in parts))

    def match(self, name: AdapterName) -> HubTarget | str:
        """The target of an adapter name, or why no entry allows the name, for people."""
        if len(name.segments) < 2:
            return "a name on the Hub has an owner and a repository: org/repo"
        uri = SourceUri("hf", name.segments[0], name.segments[1:])
        if not is_repo(uri.repo):
            return f"no repository of the Hub can be called '{uri.repo}'"
        fitting = [entry for entry in self.entries if uri.is_below(replace(entry, revision=None))]
        if not fitting:
            return f"{_VARIABLE} does not name it ({self})"
        # Entries with the most segments decide alone.
        most = max(len(entry.segments) for entry in fitting)
        deciding = [entry for entry in fitting if len(entry.segments) == most]
        pins = [entry.revision for entry in deciding if entry.revision is not None]
        revision = name.revision or deciding[0].revision or DEFAULT_REVISION
        # Foreign revisions (refs/pr/7) need a pin; other revisions do too, where every deciding entry has one.
        is_pinned = revision in pins
        if not is_pinned and is_foreign(revision):
            return f"'{revision}' is no branch or tag, and {_VARIABLE} does not pin it ({self})"
        if not is_pinned and len(pins) == len(deciding):
            return f"{_VARIABLE} pins it to another revision ({self})"
        return HubTarget(uri, revision, explicit=most > 0, is_pinned=is_pinned)

    def __str__(self) -> str:
        return ", ".join(map(shown, self.entries))


@dataclass(frozen=True, slots=True)
class AnyRepo(HubPatterns):
    """Every repository, for names that are paths of allowed URIs; `explicit` and `is_pinned` as in `HubTarget`."""

    entries: tuple[SourceUri, ...] = ()
    explicit: bool = False
    is_pinned: bool = False

    def match(self, name: AdapterName) -> HubTarget:
        """The target of `org/repo/folder@revision`; `AllowedUris.check` has already judged the revision."""
        uri = SourceUri("hf", name.segments[0], name.segments[1:])
        return HubTarget(uri, name.revision or DEFAULT_REVISION, self.explicit, self.is_pinned)

    def __str__(self) -> str:
        return "allowed URIs"


def _parse_entry(text: str) -> SourceUri:
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
        return SourceUri("hf", org, (), name.revision)
    if not is_repo(f"{org}/{repo}"):
        raise _malformed(text, "no repository that the Hub can have")
    if any("*" in folder for folder in folders):
        raise _malformed(text, "a pattern of folders")
    return SourceUri("hf", org, (repo, *folders), name.revision)


def shown(entry: SourceUri) -> str:
    """An entry as the list has it."""
    target = "/".join((entry.authority, *(entry.segments or "*")))
    return target if entry.revision is None else f"{target}@{entry.revision}"


def _malformed(entry: str, found: str) -> InvalidSettings:
    return InvalidSettings(
        f"{found} in the entry '{entry}' of {_VARIABLE}",
        expected="org/repo, org/repo/folder or org/*, each with @revision or without",
        remedy=f"correct {_VARIABLE}",
    )
