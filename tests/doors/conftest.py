"""The doors that every case is asked at, each a real server with a policy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.bed import Bed, prepare
from tests.doors.door import DOORS, Door, Kind, opened


@pytest.fixture(scope="session")
def bed() -> Bed:
    return prepare()


@pytest.fixture(scope="module", params=[pytest.param(kind, id=kind.name, marks=kind.marks) for kind in DOORS])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def home(kind: Kind, bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters and the store behind one door."""
    home = tmp_path_factory.mktemp("door")
    for name in ("sql", "chat", "team/poet"):
        shutil.copytree(bed.adapters / name, home / "adapters" / name)
    (home / "allowed").mkdir()
    return home


@pytest.fixture(scope="module")
def door(kind: Kind, bed: Bed, home: Path) -> Iterator[Door]:
    with opened(kind, bed, home) as door:
        yield door
