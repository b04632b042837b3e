"""Where vLLM's sources are, and their release, without an import of vLLM; for start-up, the doctor and the ledger."""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.util
import re
from pathlib import Path


def installed() -> Path | None:
    """Return the directory of the installed vLLM's sources, or None."""
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent.parent


@functools.lru_cache(maxsize=8)
def release_of(sources: Path) -> str:
    """Return the release of sources; empty where the sources have none."""
    # Unpacked sources have no metadata; a build writes `vllm/_version.py`.
    files = *sorted(sources.glob("vllm*.dist-info/METADATA")), sources / "vllm" / "_version.py"
    texts = (file.read_text(encoding="utf-8") for file in files if file.is_file())
    numbers = (re.search(r"^Version: (\S+)$|version = '([^']+)'", text, re.MULTILINE) for text in texts)
    return next((found[1] or found[2] for found in numbers if found), "")


def changed(sources: Path) -> list[str]:
    """Return the modules of vLLM that are not as its installation wrote them; none where no record says so."""
    records = [file.read_text(encoding="utf-8").splitlines() for file in sources.glob("vllm*.dist-info/RECORD")]
    rows = [row for record in records for row in csv.reader(record) if row[0].startswith("vllm/") and row[1]]
    return [name for name, recorded, _ in rows if name.endswith(".py") and _digest(sources / name) != recorded]


def _digest(file: Path) -> str:
    digest = hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest()
    return f"sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')}"
