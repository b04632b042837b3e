"""The front ends that every case is asked at, each a real server with a policy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.bed import Bed, prepare
from tests.front_ends.front_end import FrontEnd, Kind, opened


@pytest.fixture(scope="session")
def bed() -> Bed:
    return prepare()


@pytest.fixture(scope="module")
def home(kind: Kind, bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters and the store behind one front end."""
    home = tmp_path_factory.mktemp("front-end")
    for name in ("sql", "chat", "team/poet"):
        shutil.copytree(bed.adapters / name, home / "adapters" / name)
    (home / "allowed").mkdir()
    return home


@pytest.fixture(scope="module")
def front_end(kind: Kind, bed: Bed, home: Path) -> Iterator[FrontEnd]:
    with opened(kind, bed, home) as front_end:
        yield front_end
