"""Source URIs, and prefixes of allowed URIs; without any I/O.

Used wherever a caller names a place: the admin API, the file of declared adapters, paths in vLLM's own calls, the
allow-list of the Hub, the command line. In goes a text; out comes a `SourceUri`, or the reason for its refusal.

```
file:///adapters/sql     s3://bucket/sql     https://host/sql     hf://org/repo[@revision][/folder]
s3://arn:aws:s3:region:account:accesspoint/name/sql
s3://arn:aws:s3::account:accesspoint/alias.mrap/sql                              multi-region
s3://arn:aws:s3-outposts:region:account:outpost/id/accesspoint/name/sql
```
An access point's alias (`…-s3alias`) is a bucket's name like any other. Object Lambda access points are refused: their
answers do not have the size and ETag of their listing.

A URI has one spelling only, so prefixes are compared segment by segment, without any later resolution. Refused are `.`
and `..`, empty segments, backslashes, invisible characters, queries and fragments (presigned URLs carry credentials
there), user names and passwords, chains of fsspec (`zip://x::s3://y`), and percent-encoding of characters that need
none. Scheme and host names are compared in lower case, all other parts unchanged.

A path may have symlinks below an allowed `file://` prefix; `tree.py`, which opens the files, judges where they lead.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeGuard
from urllib.parse import quote, unquote

from lora_plugins.errors import InvalidAdapter, InvalidSettings

MAX_CHARACTERS = 2048
BY_PATH = "path"  # the scheme of directories that vLLM's own calls name by their path
ARN_PREFIX = "arn:"
ACCESS_POINT = "arn:aws:s3:region:account:accesspoint/name"

_ARN = re.compile(
    r"(?P<place>arn:aws[a-z-]*:s3(?P<outposts>-outposts)?:(?P<region>[a-z0-9-]*):[0-9]{12}):"
    r"(?:outpost[:/](?P<outpost>op-[a-z0-9]+)[:/])?accesspoint[:/]"
    r"(?P<name>[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)(?P<multi>\.mrap)?(?:/(?P<key>.*))?",
    re.DOTALL,
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_PORT = re.compile(r"(.*):([0-9]{1,5})")
_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
# Schemes with percent-encoding. In keys of other schemes a percent sign stands for itself, but a writer may have meant
# an encoding, so such keys are refused.
_ENCODED = frozenset({"file", "hf", "http", "https"})
# The text before `@` is a container, and no user: container@account.dfs.core.windows.net.
_NAMED_ACCOUNT = frozenset({"abfs", "abfss"})
_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
BRANCHES_AND_TAGS = ("refs/heads/", "refs/tags/")
# First segments of the Hub's own paths, such as datasets/org/name: no owners of models.
_NOT_MODELS = frozenset({"models", "datasets", "spaces", "buckets", "kernels", "collections"})
# Characters that never need percent-encoding (RFC 3986).
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PLAIN = "!$&'()*+,;=~-._"  # written unencoded, besides letters and digits
_TWICE = re.compile(r"%[0-9A-Fa-f]{2}")  # an encoding that is left after decoding
_KINDS_OF_REFS = {"pr", "convert", "heads", "tags"}  # in refs/<kind>/<name>, the long form of a revision


def place_by_path(path: str) -> str:
    """What vLLM reads for a path in one of its own calls: a directory's absolute path, or a Hub repository as given."""
    # No repository's name has a NUL, so a path with a NUL counts as a directory, which does not exist.
    if os.path.isabs(path) or path.startswith("~") or os.path.exists(path) or "\0" in path:
        return os.path.join(os.getcwd(), os.path.expanduser(path))
    return path


def is_by_path(place: str | None) -> TypeGuard[str]:
    """Whether a place is one of `place_by_path`; False for a URI, and for None."""
    return place is not None and (place.startswith("/") or "://" not in place)


@dataclass(frozen=True, slots=True)
class SourceUri:
    """A URI in its only spelling.

    Attributes:
        scheme: in lower case; `BY_PATH` for a directory in one of vLLM's own calls.
        authority: bucket, access point's ARN, host, container or, on the Hub, organisation; empty for files.
        segments: of the path, decoded.
        revision: on the Hub, the text behind `@`, decoded; None without `@`, and elsewhere.
    """

    scheme: str
    authority: str
    segments: tuple[str, ...]
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> SourceUri:
        """Read a URI of any scheme.

        Raises:
            InvalidAdapter: the URI is malformed, has another spelling, or carries credentials.
        """
        if len(text) > MAX_CHARACTERS:
            raise _refused(f"a URI of {len(text)} characters", f"at most {MAX_CHARACTERS}")
        match = _SCHEME.fullmatch(text)
        if match is None:
            raise _refused("no URI", "scheme://path, such as s3://bucket/sql, hf://org/repo or file:///adapters/sql")
        scheme, rest = match[1].lower(), match[2]
        for character in "?#":
            if character in rest:
                raise _refused(f"a URI with '{character}'", "a path only; credentials come from the environment")
        authority, path = _split_authority(scheme, rest)
        if path == "/":
            raise _refused("an empty segment", "no double slash")
        parts = path.removesuffix("/").split("/") if path else []
        if scheme == "hf":
            return _hub_uri(authority, parts)
        return cls(scheme, authority, tuple(_segment(part, scheme) for part in parts))

    @classmethod
    def of_path(cls, path: str) -> SourceUri:
        """The URI of a directory with the scheme `BY_PATH`, from its absolute path; only for paths in vLLM's own calls.

        The path needs no only spelling: doubled slashes count as one, and `.` and `..` stay.
        """
        return cls(BY_PATH, "", tuple(filter(None, path.split("/"))))

    @classmethod
    def of_repo(cls, repo: str) -> SourceUri:
        """The URI of a repository of the Hub, as vLLM's own calls name one: `org/repo`, without a revision.

        Raises:
            InvalidAdapter: the Hub can have no such repository.
        """
        if not is_repo(repo):
            raise _refused(f"'{repo}', which is no directory here", "an absolute path, or org/repo on the Hub")
        org, _, name = repo.partition("/")
        return cls("hf", org, (name,))

    @property
    def repo(self) -> str:
        """On the Hub: organisation and repository."""
        return f"{self.authority}/{self.segments[0]}"

    @property
    def subfolder(self) -> str:
        """On the Hub: the folder inside the repository, empty for its root."""
        return "/".join(self.segments[1:])

    @property
    def path(self) -> str:
        """The segments, joined by slashes: a key in a bucket, or a directory's path without the leading slash."""
        return "/".join(self.segments)

    def is_below(self, prefix: SourceUri) -> bool:
        """Whether the URI equals `prefix`, or lies below `prefix` at a segment's boundary."""
        return (
            (self.scheme, self.authority) == (prefix.scheme, prefix.authority)
            and self.segments[: len(prefix.segments)] == prefix.segments
            # A prefix without a revision matches every revision.
            and prefix.revision in (None, self.revision)
        )

    def __str__(self) -> str:
        safe = _PLAIN if self.scheme == "hf" else _PLAIN + "@"  # on the Hub, a plain `@` begins the revision
        parts = [quote(part, safe) if self.scheme in _ENCODED else part for part in self.segments]
        if self.revision is not None:
            parts[0] += "@" + quote(self.revision, "")
        return f"{self.scheme}://{'/'.join((self.authority, *parts))}"


def is_from(uri: str, place: str) -> bool:
    """Whether a version's URI is the operator's `place`, apart from the revision, which a version's URI never has."""
    try:
        return replace(SourceUri.parse(place), revision=None) == SourceUri.parse(uri)
    except InvalidAdapter:
        return False


@dataclass(frozen=True, slots=True)
class AllowedUris:
    """The prefixes of `LORA_PLUGINS_ALLOWED_URIS`; without a prefix, no URI is allowed."""

    prefixes: tuple[SourceUri, ...]

    @classmethod
    def parse(cls, prefixes: Iterable[str]) -> AllowedUris:
        """Read the prefixes.

        Raises:
            InvalidSettings: a prefix is no URI in its only spelling.
        """
        parsed = []
        for text in prefixes:
            try:
                parsed.append(SourceUri.parse(text))
            except InvalidAdapter as error:
                # The error does not quote the text, which may have a password.
                raise InvalidSettings(
                    f"a prefix with {error.found} in LORA_PLUGINS_ALLOWED_URIS",
                    expected=error.expected,
                    remedy="correct LORA_PLUGINS_ALLOWED_URIS",
                ) from None
        return cls(tuple(parsed))

    def check(self, text: str) -> SourceUri:
        """Read a URI, and refuse a URI that is not allowed, or without a path (on the Hub: without a repository).

        A Hub revision that is neither branch nor tag is allowed only below a prefix with this revision.

        Raises:
            InvalidAdapter: the URI is malformed, or not allowed.
        """
        uri = SourceUri.parse(text)
        below = [prefix for prefix in self.prefixes if uri.is_below(prefix)]
        if not below:
            raise InvalidAdapter(
                "a URI that is not allowed",
                expected="one below a prefix of LORA_PLUGINS_ALLOWED_URIS",
                remedy="ask for another, or have the server's operator add a prefix",
            )
        if uri.revision is not None and is_foreign(uri.revision) and not any(prefix.revision for prefix in below):
            raise InvalidAdapter(
                f"the revision '{uri.revision}', which is no branch or tag: anybody can propose one",
                expected="a branch, a tag, or a commit that one of them reaches",
                remedy="merge it first, or have the server's operator add this URI to LORA_PLUGINS_ALLOWED_URIS",
            )
        if not uri.segments:
            raise _refused("a URI without a path", "the adapter's directory")
        return uri


def is_foreign(revision: str) -> bool:
    """Whether a revision is spelled as a reference that is no branch or tag: `refs/pr/7`, `refs/convert/…`.

    False for a plain name and for a commit, whose spelling does not show who has made it.
    """
    return revision.startswith("refs/") and not revision.startswith(BRANCHES_AND_TAGS)


def is_repo(text: str) -> bool:
    """Whether `text` can be a repository with its owner, by the Hub's own rules."""
    parts = text.split("/")
    return (
        len(parts) == 2
        and all(_REPO_PART.fullmatch(part) is not None for part in parts)
        and "--" not in text
        and ".." not in text
        and not text.endswith(".git")
    )


def split_access_point(path: str) -> tuple[str, str] | None:
    """Split `path` into the ARN of an access point, with its colons in the resource replaced by slashes, and the key.

    None where `path` does not begin with the ARN of an access point.
    """
    match = _ARN.fullmatch(path)
    if match is None:
        return None
    is_multi = match["multi"] is not None
    # Multi-region access points have no region, all others have one; `s3-outposts` and an outpost go together.
    if bool(match["region"]) == is_multi or bool(match["outposts"]) != bool(match["outpost"]):
        return None
    resource = f"accesspoint/{match['name']}{match['multi'] or ''}"
    if match["outpost"]:
        resource = f"outpost/{match['outpost']}/{resource}"
    return f"{match['place']}:{resource}", match["key"] or ""


def region_of(bucket: str) -> str | None:
    """The region of an access point's ARN, empty for a multi-region access point; None for a bucket's name."""
    return bucket.split(":")[3] if bucket.startswith(ARN_PREFIX) else None


def split_bucket(uri: str) -> tuple[str, str]:
    """The bucket or access point of a well-formed `s3://` URI, and the key."""
    path = uri.removeprefix("s3://")
    found = split_access_point(path)
    if found is not None:
        return found
    bucket, _, key = path.partition("/")
    return bucket, key


def _split_authority(scheme: str, rest: str) -> tuple[str, str]:
    """The authority of a URI, and the path without its leading slash; `rest` is the URI without scheme and `://`."""
    access_point = None
    if scheme in ("s3", "s3a") and rest.startswith(ARN_PREFIX):
        access_point = split_access_point(rest)
        if access_point is None:
            raise _refused("an ARN that is no access point's", ACCESS_POINT)
    # `zip://x::s3://y` is a chain of fsspec. An ARN has `::` too where the region is empty, so look behind the ARN.
    if "::" in (rest if access_point is None else access_point[1]):
        raise _refused("a chain of URIs", "one URI")
    if access_point is not None:
        return access_point
    authority, _, path = rest.partition("/")
    return _authority(scheme, authority), path


def _authority(scheme: str, text: str) -> str:
    """The authority in its only spelling: hosts of HTTP in lower case, and without the default port.

    Raises:
        InvalidAdapter: the authority is malformed, or carries credentials.
    """
    if scheme == "file":
        if text.lower() not in ("", "localhost"):
            raise _refused("a host in a file URI", "file:///path")
        return ""
    if "@" in text and scheme in _NAMED_ACCOUNT:
        container, _, account = text.partition("@")
        if _NAME.fullmatch(container) and _NAME.fullmatch(account):
            return f"{container}@{account.lower()}"
    if "@" in text:
        raise _refused("a user name or password in a URI", "credentials in the environment")
    port = _PORT.fullmatch(text)
    host, number = (port[1], port[2]) if port is not None and scheme != "hf" else (text, "")
    if _NAME.fullmatch(host) is None or ".." in host:
        raise _refused("a malformed bucket, host or owner", "letters, digits, '.', '-' and '_'")
    if scheme in _DEFAULT_PORTS:
        host, number = host.lower(), number if number != _DEFAULT_PORTS[scheme] else ""
    return f"{host}:{number}" if number else host


def _hub_uri(org: str, parts: list[str]) -> SourceUri:
    """The URI of a repository of the owner `org` by the path's segments, or without segments, of the owner alone.

    Raises:
        InvalidAdapter: the URI is malformed.
    """
    if org in _NOT_MODELS:
        raise _refused(f"a URI of the Hub's {org}", "hf://org/repo of a model")
    if not parts:
        if not is_repo(f"{org}/any"):
            raise _refused("an owner that the Hub cannot have", "hf://org/repo")
        return SourceUri("hf", org, ())
    repo, at, revision = parts[0].partition("@")
    if not is_repo(f"{org}/{repo}"):
        raise _refused("a repository that the Hub cannot have", "hf://org/repo")
    below = parts[1:]
    if at and not revision:
        raise _refused("nothing after '@'", "a revision there, or no '@'")
    # A revision such as `refs/pr/7` has been split at its slashes.
    if revision == "refs" and len(below) >= 2 and below[0] in _KINDS_OF_REFS:
        revision, below = "/".join((revision, *below[:2])), below[2:]
    # The Hub's own spelling of a revision with slashes is one segment with %2F inside.
    pieces = re.sub("%2f", "/", revision, flags=re.IGNORECASE).split("/")
    segments = (repo, *(_segment(part, "hf") for part in below))
    return SourceUri("hf", org, segments, "/".join(_segment(piece, "hf") for piece in pieces) if at else None)


def _segment(text: str, scheme: str) -> str:
    """Decode one segment of a path.

    Raises:
        InvalidAdapter: the segment has another spelling, or may not be in a path.
    """
    decoded = _decode(text) if scheme in _ENCODED else text
    if "%" in text and scheme not in _ENCODED:
        raise _refused("a percent sign in a key", "keys without one")
    if decoded in ("", ".", ".."):
        raise _refused("an empty segment" if not decoded else f"the segment '{decoded}'", "names between slashes")
    # Some HTTP servers decode twice, and would read another path than the checked path.
    if scheme in _DEFAULT_PORTS and _TWICE.search(decoded):
        raise _refused("percent-encoding inside percent-encoding", "one that is decoded once")
    if scheme == "hf" and "@" in decoded:
        raise _refused("more than one '@'", "one revision, behind the repository")
    # Otherwise two URIs that look alike could be two different texts for the comparison with prefixes.
    if not unicodedata.is_normalized("NFC", decoded) or decoded != decoded.strip(" "):
        raise _refused("a segment with another spelling", "composed Unicode (NFC), and no space at either end")
    for character in decoded:
        # Unicode categories C (control, format, unassigned) and Z (separators) are invisible.
        if character in "\\/" or (character != " " and unicodedata.category(character)[0] in "CZ"):
            raise _refused(f"the character U+{ord(character):04X} in a segment", "visible characters, no backslash")
    return decoded


def _decode(text: str) -> str:
    """Decode percent-encoding, and refuse encoding that is malformed, needless or not UTF-8."""
    if _ESCAPE.search(text):
        raise _refused("a percent sign that encodes nothing", "%25 for a percent sign")
    # A second spelling of the same URI could slip past a comparison with prefixes.
    for escape in re.findall("%(..)", text):
        if chr(int(escape, 16)) in _UNRESERVED:
            raise _refused(f"%{escape}, which needs no encoding", "the character itself")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise _refused("percent-encoding that is not UTF-8", "UTF-8") from None


def _refused(found: str, expected: str) -> InvalidAdapter:
    return InvalidAdapter(found, expected=expected, remedy="correct the URI")
