"""How often tests repeat what chance decides: less in each run than before a release (`make test-long`)."""

from __future__ import annotations

import os

IS_LONG = os.environ.get("LONG_TESTS") == "1"


def times(number: int, *, short: int) -> int:
    """How often, in a long run and otherwise."""
    return number if IS_LONG else short
