"""One process that has imported vLLM, from which the engine of each architecture is forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed.forked_engines import ForkedEngines


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedEngines]:
    with ForkedEngines(tmp_path_factory.mktemp("models") / "engines.log") as engines:
        yield engines
