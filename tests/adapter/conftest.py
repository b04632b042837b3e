"""What the tests of adapters share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.make import adapter_files, put


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A good one, for a test to spoil."""
    return put(tmp_path / "sql", adapter_files())
