"""Which names a server served, in a file of the store, so that the next one can serve them from its start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lora_plugins.log import logger
from lora_plugins.store.layout import Layout, key_of, replace_small

FORMAT = 1


@dataclass(frozen=True, slots=True)
class ServedName:
    """One name: where it came from, if not from where its name says, the version it was held at, and its pin."""

    name: str
    uri: str | None = None
    held_digest: str | None = None
    is_pinned: bool = False


class ServedFile:
    """The file of one base model; replicas that share a store share it, and the last one that writes wins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_store(cls, root: Path, base_path: str) -> ServedFile:
        """The file below a store's root for the served model's path or Hub id."""
        return cls(Layout(root).folder("served") / f"{key_of(base_path)}.json")

    def read(self) -> list[ServedName]:
        """What was written last; nothing, with a warning, where the file cannot be read."""
        try:
            content = json.loads(self.path.read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}")
            return [name for one in content["served"] if (name := _served_name(one)) is not None]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("What was served before cannot be read from %s: %s", self.path, error)
            return []

    def write(self, served: Sequence[ServedName]) -> None:
        """Put this in the place of what was written before.

        Raises:
            OSError: it cannot be written; what was written before stays.
        """
        replace_small(self.path, json.dumps({"format": FORMAT, "served": [asdict(one) for one in served]}, indent=1))


def _served_name(entry: dict[str, object]) -> ServedName | None:
    name, uri, held_digest = (entry.get(field) for field in ("name", "uri", "held_digest"))
    if not isinstance(name, str):
        return None
    return ServedName(
        name,
        uri if isinstance(uri, str) else None,
        held_digest if isinstance(held_digest, str) else None,
        entry.get("is_pinned") is True,
    )
