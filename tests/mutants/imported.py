"""A pytest plugin: the tests, and the processes that they start, import the product of this copy and of no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_COPY = Path(__file__).parents[2]


def pytest_configure() -> None:
    asks = "import lora_plugins; print(lora_plugins.__file__)"
    child = subprocess.run([sys.executable, "-c", asks], cwd="/", capture_output=True, text=True, check=True)
    import lora_plugins

    for imported in (lora_plugins.__file__, child.stdout.strip()):
        if Path(imported) != _COPY / "lora_plugins" / "__init__.py":
            raise pytest.UsageError(f"{imported} is imported, which is not in {_COPY}")
