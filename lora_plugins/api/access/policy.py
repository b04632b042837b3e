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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lora_plugins.adapter.mixture import terms_of
from lora_plugins.adapter.names import MAX_CHARACTERS
from lora_plugins.errors import InvalidSettings
from lora_plugins.server.limits import Rate

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
_RATE = ("requests_per_minute", "tokens_per_minute")
_FIELDS = {
    "": ("default", "tenants"),
    "default": ("adapters", "share", *_RATE),
    "tenants": ("keys", "adapters", "admin", "share", "pushes", "pushes_per_minute", *_RATE),
}
_SHARE = 0.5  # so that no principal takes everything


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
        """Whether `pushes` covers this adapter."""
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
            raise _wrong(f"a file that answers '{error.strerror}'", "a file that can be read", path) from None
        except UnicodeDecodeError:
            raise _wrong("bytes that are no UTF-8", "TOML in UTF-8", path) from None
        except InvalidSettings as error:
            raise _wrong(error.found, error.expected, path) from None

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
        _check_fields("", tables, "")
        default = _table("default", tables.get("default", {}))
        _check_fields("default", default, "default")
        tenants: dict[bytes, Principal] = {}
        owners: dict[bytes, str] = {}
        for label, item in _table("tenants", tables.get("tenants", {})).items():
            where = f"tenants.{label}"
            table = _table(where, item)
            _check_fields("tenants", table, where)
            principal = _tenant(label, table, where)
            for place, digest in _keys(table, where):
                if digest in owners:
                    raise InvalidSettings(f"the key of {owners[digest]} once more in {place}", expected="a key once")
                owners[digest] = place
                tenants[digest] = principal
        share, rate = _share(default, "default"), _rate("(default)", default, "default")
        everybody = Principal("(default)", _patterns(default, "default"), share=share, rate=rate)
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
    def has_rates(self) -> bool:
        """Whether a principal has a limit of requests or tokens."""
        return any(principal.rate is not None for principal in (self.default, *self._tenants.values()))

    @property
    def key_count(self) -> int:
        """Number of keys in the policy."""
        return len(self._tenants)

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _folder_of(path: str) -> str:
    return path.partition("@")[0].rpartition("/")[0]


def _tenant(label: str, table: Mapping[str, Any], where: str) -> Principal:
    is_admin = table.get("admin", False)
    if not isinstance(is_admin, bool):
        raise InvalidSettings(f"{where}.admin that is neither true nor false", expected="true or false")
    # A forgotten field must not silently mean "no adapter".
    if "adapters" not in table and not is_admin:
        raise InvalidSettings(f"{where} without adapters", expected="adapters = [...], be it an empty list")
    share = 1.0 if is_admin else _share(table, where)
    pushes = _patterns(table, where, "pushes")
    pushes_per_minute = _per_minute(table, where, "pushes_per_minute")
    rate = _rate(label, table, where)
    return Principal(label, _patterns(table, where), is_admin, share, pushes, pushes_per_minute, rate=rate)


def _rate(label: str, table: Mapping[str, Any], where: str) -> Rate | None:
    limits = [_per_minute(table, where, field) for field in _RATE]
    return None if limits == [None, None] else Rate(label, *limits)


def _per_minute(table: Mapping[str, Any], where: str, field: str) -> int | None:
    count = table.get(field)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise InvalidSettings(
            f"{where}.{field} that is no number of {field.removesuffix('_per_minute')}", expected="1 or more"
        )
    return count


def _share(table: Mapping[str, Any], where: str) -> float:
    share = table.get("share", _SHARE)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InvalidSettings(f"{where}.share that is no share of the whole", expected="more than 0, and 1 at most")
    return float(share)


def _patterns(table: Mapping[str, Any], where: str, field: str = "adapters") -> tuple[NamePattern, ...]:
    patterns = _texts(table, field, where)
    for number, text in enumerate(patterns):
        # A space at an end is a typing error that no name would ever match.
        if not text or text != text.strip():
            raise InvalidSettings(
                f"{where}.{field}[{number}] that is empty or has a space at an end", expected="a pattern of names"
            )
    return tuple(NamePattern(text) for text in patterns)


def _keys(table: Mapping[str, Any], where: str) -> Iterator[tuple[str, bytes]]:
    """The place of each key in the file, and the key's SHA-256."""
    keys = _texts(table, "keys", where)
    if not keys:
        raise InvalidSettings(f"{where} without keys", expected="keys = [...] with one at least")
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


def _texts(table: Mapping[str, Any], field: str, where: str) -> list[str]:
    texts = table.get(field, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidSettings(f"{where}.{field} that is no list of strings", expected=f'{field} = ["...", ...]')
    return texts


def _table(where: str, item: object) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise InvalidSettings(f"{where} that is no table", expected=f"[{where}]")
    return item


def _check_fields(kind: str, table: Mapping[str, Any], where: str) -> None:
    known = _FIELDS[kind]
    for field in table:
        if field not in known:
            raise InvalidSettings(
                f"the unknown field {field!r}" + (f" in {where}" if where else ""),
                expected="one of " + ", ".join(known),
            )


def _wrong(found: str, expected: str, path: Path) -> InvalidSettings:
    return InvalidSettings(
        f"{found} in the file of LORA_PLUGINS_POLICY",
        expected=expected,
        remedy=f"correct {path}",
        file=path.name,
    )
