"""How long each file of tests took where `make bench-suite` last ran: the longest begin first."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).with_name("seconds.json")


def of_files() -> dict[str, float]:
    """Seconds by path from the root of the checkout."""
    return dict(json.loads(FILE.read_text()))
