"""The file of declared adapters: its format, and its parser, for large files in a reading process.

```yaml
adapters:
  - name: sql                     # wherever the server's sources have this name
    preload: true                 # the server is ready only when it is served
  - name: support
    uri: s3://adapters/support/v3
    digest: 9c12fc44…             # serve this version and no other: all 64 characters
    pin: true
  - name: legal
    uri: hf://acme/legal
    revision: v2.1
```

Parsing 1 MB in the server would hold the interpreter's lock for a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from lora_plugins.adapter.mixture import canonical
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, InvalidSettings, LoRAPluginsError
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.log import logger
from lora_plugins.resolvers.sources.uri import AllowedUris, SourceUri
from lora_plugins.store.layout import is_digest
from lora_plugins.verification.children import children

VARIABLE = "LORA_PLUGINS_ADAPTERS_FILE"
MAX_BYTES = 1 << 20  # as large as a ConfigMap may be
_SMALL_BYTES = 4 << 10  # parsed in under 10 ms
_MAX_NAMED = 5
# Types of pydantic's errors, in words for the author of the YAML.
_MEANING = {
    "missing": "is missing",
    "string_type": "not a text; put it into quotes",
    "string_too_short": "empty",
    "string_too_long": "longer than 512 characters",
    "string_pattern_mismatch": "not a digest: 0 to 9 and a to f",
    "bool_type": "neither true nor false",
    "list_type": "not a list; each adapter begins with '- '",
    "model_type": "not a mapping, such as {name: sql}",
}


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(min_length=1, max_length=512), AfterValidator(canonical)]
    uri: str | None = None
    revision: str | None = Field(default=None, min_length=1)
    digest: str | None = Field(default=None, pattern="^[0-9a-f]+$")
    pin: bool = False
    preload: bool = False


class _AdaptersFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    adapters: list[_Declared] | None


def read_bytes(path: Path) -> bytes:
    """The content of the file.

    Raises:
        InvalidSettings: the file cannot be read, or is larger than a ConfigMap can be.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _invalid(
            path, f"a file that cannot be read: {error.strerror}", "one that the server's user may read"
        ) from None
    if len(content) > MAX_BYTES:
        raise _invalid(path, f"more than {MAX_BYTES} bytes", f"at most {MAX_BYTES}")
    return content


def parse(content: bytes, path: Path, allowed: AllowedUris) -> Mapping[str, DesiredAdapter]:
    """The adapters by name, in the file's order.

    Raises:
        InvalidSettings: an entry is wrong; no entry of the file counts then.
    """
    try:
        # safe_load makes no Python objects; RecursionError comes from deep nesting.
        document = yaml.safe_load(content)
    except yaml.MarkedYAMLError as error:
        at = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise _invalid(path, f"no YAML: {at}{error.problem or error.context}", "a list below 'adapters:'") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _invalid(path, f"no YAML: {' '.join(str(error).split())}", "a list below 'adapters:'") from None
    if document is None:
        raise _invalid(path, "an empty file", "a list below 'adapters:', or 'adapters: []' for none")
    try:
        declared = _AdaptersFile.model_validate(document).adapters or []
    except ValidationError as error:
        problems = "; ".join(_problem(each) for each in error.errors()[:_MAX_NAMED])
        raise _invalid(path, problems, "name, uri, revision, digest, pin and preload for each adapter") from None
    adapters: dict[str, DesiredAdapter] = {}
    for each in declared:
        if each.name in adapters:
            raise _invalid(path, f"'{each.name}' twice", "each name once")
        try:
            adapters[each.name] = _desired(each, allowed)
        except (AdapterNotFound, InvalidAdapter) as error:
            raise _invalid(path, f"'{each.name}': {error.found}", error.expected, error.remedy) from None
    return adapters


def parse_apart(content: bytes, path: Path, allowed_uris: Sequence[str]) -> Mapping[str, DesiredAdapter]:
    """Parse as `parse` does, for a thread: the event loop goes on meanwhile. Without a child, this process parses.

    Raises:
        InvalidSettings: as `parse` does.
    """
    if len(content) > _SMALL_BYTES:
        asked = json.dumps([str(path), list(allowed_uris)]).encode() + b"\n" + content
        try:
            # A few milliseconds for the largest file.
            found = json.loads(children().call(answer, asked).result())
            return {fields["name"]: DesiredAdapter(**fields) for fields in found}
        except InvalidSettings:
            raise
        except LoRAPluginsError as error:
            logger.warning("No other process parses %s, so the server itself does: %s", path, error)
    return parse(content, path, AllowedUris.parse(allowed_uris))


def answer(asked: bytes) -> bytes:
    """Answer `parse` for another process, in JSON: takes path and prefixes on a line, then the content.

    Returns the fields of each adapter.

    Raises:
        InvalidSettings: as `parse` does.
    """
    about, _, content = asked.partition(b"\n")
    path, allowed_uris = json.loads(about)
    found = parse(content, Path(path), AllowedUris.parse(allowed_uris)).values()
    return json.dumps([asdict(it) for it in found]).encode()


def _desired(declared: _Declared, allowed: AllowedUris) -> DesiredAdapter:
    AdapterName.parse(declared.name)
    if declared.digest is not None and not is_digest(declared.digest):
        # 8 characters are enough for a lookup, but a declaration must not match a forged digest with the same
        # beginning.
        raise InvalidAdapter(
            f"{len(declared.digest)} characters of a digest",
            expected="all 64: another adapter can be made to begin with the same ones",
            remedy="copy the whole digest, as GET /v1/loras and 'lora-plugins ls --json' show it",
        )
    uri = _with_revision(declared)
    if uri is not None:
        allowed.check(uri)
    return DesiredAdapter(declared.name, uri, declared.digest, declared.pin, is_awaited=declared.preload)


def _with_revision(declared: _Declared) -> str | None:
    if declared.revision is None:
        return declared.uri
    if not (declared.uri or "").startswith("hf://"):
        raise InvalidAdapter(
            "a revision without an hf:// URI",
            expected="revision with uri: hf://…",
            remedy="leave it out; a source of names takes name: sql@v3, any source digest: …",
        )
    uri = SourceUri.parse(declared.uri or "")
    if uri.revision is not None:
        raise InvalidAdapter("a revision beside one in the URI", expected="one of the two", remedy="leave one out")
    return str(replace(uri, revision=declared.revision))


def _problem(error: Any) -> str:
    if (error["type"], error["loc"]) == ("missing", ("adapters",)):
        return "the key 'adapters' is missing"
    place = [str(part) if isinstance(part, str) else f"entry {part + 1}" for part in error["loc"] if part != "adapters"]
    text = _MEANING.get(error["type"]) or str(error["msg"])
    if error["type"] == "extra_forbidden":
        known = [*_Declared.model_fields, "adapters"]
        # A mistyped field is the most frequent error, so suggest the nearest field.
        close = get_close_matches(place[-1], known, n=1)
        text = "not known" + (f", did you mean '{close[0]}'?" if close else "")
    return f"{', '.join(place) or 'the file'}: {text}"


def _invalid(path: Path, found: str, expected: str, remedy: str = "") -> InvalidSettings:
    return InvalidSettings(
        f"{VARIABLE}={path}: {found}",
        expected=expected,
        remedy=remedy or "correct the file; see lora-plugins explain L007",
    )
