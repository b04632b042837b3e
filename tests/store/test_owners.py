"""Mount points are whoever mounts them's, as the volumes of containers are made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.store.owners import check_owners


def test_a_volume_that_everybody_may_write_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    with pytest.raises(InvalidSettings, match="every user may exchange it"):
        check_owners(volume / "store")
    is_mount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == volume or is_mount(path))
    check_owners(volume / "store")
    check_owners(volume)
