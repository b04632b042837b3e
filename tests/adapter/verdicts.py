"""What verification says of a directory: that it can be served, or one error with all of its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_plugins.adapter.verify import VerifiedAdapter, verify_adapter
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import Settings
from tests.make import BASE


def verified(directory: Path, **changes: object) -> VerifiedAdapter:
    return verify_adapter(directory, BASE, Settings(**changes))


def refused(kind: type[LoRAPluginsError], directory: Path, file: str, **changes: object) -> LoRAPluginsError:
    with pytest.raises(kind) as caught:
        verified(directory, **changes)
    error = caught.value
    assert type(error) is kind
    assert error.file == file
    for part in (error.found, error.expected, error.remedy, f"[{kind.code}]", f"'{file}'"):
        assert part
        assert part in str(error)
    return error
