"""What verification says of a directory: that it can be served, or one error with all of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.verify import VerifiedAdapter, verify_adapter
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from lora_plugins.settings import Settings
from tests.make import BASE, adapter_files, put

REFUSED = (IncompatibleAdapter, InvalidAdapter)


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


def refusal(
    directory: Path,
    tensors: dict[str, Any],
    base: BaseModel = BASE,
    *,
    kind: type[LoRAPluginsError] | tuple[type[LoRAPluginsError], ...] = REFUSED,
    says: str = ".",
    **config: object,
) -> LoRAPluginsError:
    """The error of an adapter of these tensors, or of these files with a configuration."""
    files = tensors if CONFIG_FILE in tensors else adapter_files(tensors, **config)
    with pytest.raises(kind, match=says) as caught:
        verify_adapter(put(directory / "refused", files), base, Settings())
    assert type(caught.value) in (kind if isinstance(kind, tuple) else (kind,))
    assert caught.value.remedy
    return caught.value
