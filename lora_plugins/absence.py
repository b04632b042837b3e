"""Why a source has no adapter of a name: facts for the log and the command line; clients get a `cause` alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_plugins.errors import AdapterNotFound

_LOGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<login>[^/?#\s'\"]*)@")
# Queries of presigned URLs carry signatures.
_QUERY = re.compile(r"(https?://[^\s?#'\"]*[?#])[^\s'\"]+")


@dataclass(frozen=True, slots=True)
class Absence:
    """A source's answer "no such adapter".

    Attributes:
        source: the label of the source.
        place: the path, URL or repository where the source looked, without credentials; empty where it looked nowhere.
        detail: what lies there, or why the source was not asked; without the place.
        hint: what the source's operator may do about the absence, where known.
        was_asked: whether the source was asked; False where its settings leave the name out.
        is_remembered: whether the source said so a moment ago, and was not asked again.
        cause: what clients get where no source has the adapter: another program's files lie there. None where they get
        what vLLM says.
    """

    source: str
    place: str
    detail: str
    hint: str = ""
    was_asked: bool = True
    is_remembered: bool = False
    cause: AdapterNotFound | None = None

    def __str__(self) -> str:
        said = f"{self.place}: {self.detail}" if self.place else self.detail
        said = said if self.was_asked else f"not asked: {said}"
        return f"{said} (a moment ago)" if self.is_remembered else said


def without_login(url: str) -> str:
    """Return a text without the user names, passwords and queries of URLs: a mirror's may be keys.

    The container of `abfs://container@account` is no login, and stays.
    """
    return _QUERY.sub(r"\1…", _LOGIN.sub(_hidden, url))


def _hidden(match: re.Match[str]) -> str:
    is_container = match["scheme"].lower() in ("abfs", "abfss") and ":" not in match["login"]
    return match[0] if is_container else f"{match['scheme']}://…@"
