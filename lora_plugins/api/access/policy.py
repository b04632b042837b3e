"""The policy file: which API key may use which adapter names, and who may administer.

```toml
[default]                       # requests with another key, or with none; left out, they may use no adapter
adapters = ["public/*"]

[tenants.team-a]
keys = ["sha256:2bb80d53…", "a-plain-key"]
adapters = ["team-a/*", "shared/sql"]
share = 0.3                     # of host memory, store and look-ups at once; 0.5 where it is left out
requests_per_minute = 600       # of all keys together; no limit where it is left out
tokens_per_minute = 100_000

[tenants.operators]
keys = ["sha256:5e884898…"]
admin = true                    # every adapter, and the routes that load, unload and report
```
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from lora_plugins.adapter.mixture import terms_of
from lora_plugins.adapter.names import MAX_CHARACTERS
from lora_plugins.errors import InvalidSettings
from lora_plugins.lifecycle.principal_limits import Rate

# Patterns of adapter names: `*` matches any characters, also slashes, `?` one character; others match themselves.
#
# A pattern without `@` matches every revision: `team-a/sql` covers `team-a/sql@v2`. A pattern with `@` is compared
# with the whole name. A mixture is no text for a pattern: only its parts are.


@dataclass(frozen=True, slots=True)
class NamePattern:
    """One pattern; must not be empty."""

    text: str

    @property
    def is_plain(self) -> bool:
        """Whether the pattern covers a single name, with all revisions or a single revision."""
        return "*" not in self.text and "?" not in self.text

    def matches(self, name: str) -> bool:
        """Whether the pattern covers this name, case-sensitively. No text too long for a name, and no mixture, is."""
        if len(name) > MAX_CHARACTERS or terms_of(name) is not None:
            return False
        return _expression(self.text).fullmatch(name if "@" in self.text else name.partition("@")[0]) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    # The expressions of fnmatch never go back beyond the last star, so that no pattern takes exponential time.
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]")))


_HASHED = "sha256:"
_HASH = re.compile(r"[0-9a-fA-F]{64}")
# A pattern with a space at an end is a typing error that no name would ever match.
_Patterns = tuple[Annotated[str, msgspec.Meta(pattern=r"^\S(.*\S)?\Z")], ...]
_PerMinute = Annotated[int, msgspec.Meta(ge=1)] | None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    default: object = msgspec.field(default_factory=dict)
    tenants: dict[str, object] = msgspec.field(default_factory=dict)


class _Default(msgspec.Struct, forbid_unknown_fields=True):
    adapters: _Patterns | None = None
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5  # so that no principal takes everything
    requests_per_minute: _PerMinute = None
    tokens_per_minute: _PerMinute = None

    def rate(self, label: str) -> Rate | None:
        limits = self.requests_per_minute, self.tokens_per_minute
        return None if limits == (None, None) else Rate(label, *limits)


class _Tenant(_Default, forbid_unknown_fields=True, kw_only=True):
    keys: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    admin: bool = False
    pushes: _Patterns = ()
    pushes_per_minute: _PerMinute = None

    def principal(self, label: str, where: str) -> Principal:
        # A forgotten field must not silently mean "no adapter".
        if self.adapters is None and not self.admin:
            raise InvalidSettings(f"{where} without adapters", expected="adapters = [...], be it an empty list")
        share, pushes = 1.0 if self.admin else self.share, _compiled(self.pushes)
        patterns, rate = _compiled(self.adapters), self.rate(label)
        return Principal(label, patterns, self.admin, share, pushes, self.pushes_per_minute, rate=rate)


@dataclass(frozen=True, slots=True)
class Principal:
    """The origin of a request: a tenant of the policy, or everybody else.

    `label` is for logs; `share` limits the part of host memory, store and look-ups that running requests may use;
    `pushes` covers the adapters that the principal may push, at most `pushes_per_minute` (None: no limit);
    `is_pusher`: an administrator for this call only, of a name that `pushes` covers; `rate` limits requests and tokens
    (None: no limit).
    """

    label: str
    patterns: tuple[NamePattern, ...] = ()
    is_admin: bool = False
    share: float = 1.0
    pushes: tuple[NamePattern, ...] = ()
    pushes_per_minute: int | None = None
    is_pusher: bool = False
    rate: Rate | None = None

    def may_use(self, name: str) -> bool:
        """Whether requests may name this adapter; a pusher's call may name what the pusher may push, too."""
        if self.is_admin and not self.is_pusher:
            return True
        if terms := terms_of(name):  # the answers of a mixture tell of each of its parts
            return all(self.may_use(term.name) for term in terms)
        return any(pattern.matches(name) for pattern in (*self.patterns, *(self.pushes if self.is_pusher else ())))

    def may_push(self, name: str) -> bool:
        """Whether the principal may push this adapter, and call the routes that a push needs."""
        return self.is_admin or self.owns(name)

    def owns(self, name: str) -> bool:
        return any(pattern.matches(name) for pattern in self.pushes)

    def is_named(self, name: str) -> bool:
        """Whether a pattern without wildcards covers this adapter."""
        return any(pattern.is_plain and pattern.matches(name) for pattern in self.patterns)


class Policy:
    """Principals by their keys; the object keeps keys only as digests, under a secret of this process.

    A lookup hashes the key with the secret, so the time of a lookup shows nothing of other keys.
    """

    def __init__(self, default: Principal, tenants: Mapping[bytes, Principal]) -> None:
        """Make a policy; `tenants` maps the SHA-256 of each key to a principal."""
        self.default = default
        # A new secret for each process: timings of one process cannot be used against another.
        self._secret = os.urandom(32)
        self._tenants = {self._blinded(digest): principal for digest, principal in tenants.items()}

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read the file of `LORA_PLUGINS_POLICY`.

        Raises:
            InvalidSettings: the file cannot be read, or has an error. The text never has a key.
        """
        try:
            return cls.parse(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            found, expected = f"a file that answers '{error.strerror}'", "a file that can be read"
        except UnicodeDecodeError:
            found, expected = "bytes that are no UTF-8", "TOML in UTF-8"
        except InvalidSettings as error:
            found, expected = error.found, error.expected
        found = f"{found} in the file of LORA_PLUGINS_POLICY"
        raise InvalidSettings(found, expected=expected, remedy=f"correct {path}", file=path.name)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy's TOML.

        Raises:
            InvalidSettings: no TOML, an unknown field, an empty pattern, a malformed key, or a key twice.
        """
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            # Only the position: the whole text may repeat a part of the file, and so a key.
            at = re.search(r"\(at [^)]*\)", str(error))
            raise InvalidSettings(f"no TOML {at[0] if at else ''}".strip(), expected="TOML") from None
        file = _read(tables, _File, "")
        tenants: dict[bytes, Principal] = {}
        owners: dict[bytes, str] = {}
        for label, item in file.tenants.items():
            where = f"tenants.{label}"
            table = _read(item, _Tenant, where)
            principal = table.principal(label, where)
            for place, digest in _keys(table.keys, where):
                if digest in owners:
                    raise InvalidSettings(f"the key of {owners[digest]} once more in {place}", expected="a key once")
                owners[digest] = place
                tenants[digest] = principal
        default = _read(file.default, _Default, "default")
        label = "(default)"
        everybody = Principal(label, _compiled(default.adapters), share=default.share, rate=default.rate(label))
        return cls(everybody, tenants)

    def of_key(self, key: str | None) -> Principal:
        """The principal of a key; the default's where no tenant has the key, or `key` is None."""
        if key is None:
            return self.default
        # With surrogateescape an odd key is an unknown key, and not an error.
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        return self._tenants.get(self._blinded(digest), self.default)

    def may_lead(self, name: str, place: str) -> bool:
        """Whether a link may make the adapter at `place` the adapter `name`: both are paths below the adapters' root.

        Every principal who may use the name must be allowed to use the place. Exception: the policy has exactly the
        name, not a pattern that covers the name, and the link leads to a neighbour in the name's folder.
        """
        principals = [self.default, *self._tenants.values()]
        return all(
            principal.may_use(place) or (principal.is_named(name) and _folder_of(name) == _folder_of(place))
            for principal in principals
            if principal.may_use(name)
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the tenants with a key, in the file's order."""
        return tuple(dict.fromkeys(principal.label for principal in self._tenants.values()))

    @property
    def key_count(self) -> int:
        return len(self._tenants)

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _folder_of(path: str) -> str:
    return path.partition("@")[0].rpartition("/")[0]


_S = TypeVar("_S", bound=msgspec.Struct)


def _read(table: object, kind: type[_S], where: str) -> _S:
    """The table at a place of the file; raises InvalidSettings for an unknown field, or a wrong value."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:  # says types, limits and names of fields, never a value
        said, _, at = str(error).replace("`array", "`list").partition(" - at `$")
        place = f"{where}{at.removesuffix('`')}".strip(".") or "the file"
        known = ", ".join(kind.__struct_fields__)
        raise InvalidSettings(f"{place}: {said}", expected=f"a table with {known}") from None


def _compiled(texts: Iterable[str] | None) -> tuple[NamePattern, ...]:
    return tuple(map(NamePattern, texts or ()))


def _keys(keys: Iterable[str], where: str) -> Iterator[tuple[str, bytes]]:
    """The place of each key in the file, and the key's SHA-256."""
    for number, key in enumerate(keys):
        place = f"{where}.keys[{number}]"
        if key.startswith(_HASHED):
            if _HASH.fullmatch(key.removeprefix(_HASHED)) is None:
                raise InvalidSettings(f"a malformed hash in {place}", expected=f"{_HASHED} and 64 hexadecimal digits")
            yield place, bytes.fromhex(key.removeprefix(_HASHED))
        # A key is sent behind `Authorization: Bearer`, where RFC 6750 allows only ASCII without spaces.
        elif not key or not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidSettings(f"a key that no header can carry in {place}", expected="printable ASCII, no space")
        else:
            yield place, hashlib.sha256(key.encode()).digest()
