"""What every source of adapters does; `tests/resolvers/contract.py` holds each of them to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lora_plugins.names import AdapterName


@dataclass(frozen=True, slots=True)
class Located:
    """An adapter that a source has: the directory to verify and to serve.

    `inside` is the directory that the adapter's files must stay below, or None where symlinks may leave it.
    """

    name: AdapterName
    source: str
    directory: Path
    inside: Path | None = None


class Source(Protocol):
    """A place adapters come from.

    `locate` answers None only where the source itself says that it has no such adapter. It raises:
        InvalidAdapter, AdapterNotFound: it has one of this name, but not one that can be served.
        SourceUnavailable: it cannot say.
    """

    @property
    def label(self) -> str:
        """The source's name in logs and metrics, such as `filesystem`."""
        ...

    async def locate(self, name: AdapterName) -> Located | None:
        """Find the adapter without reading its weights."""
        ...
