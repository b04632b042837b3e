"""What the tests of deployments share: the demo's base model and adapters, with PEFT's answers."""

from __future__ import annotations

import pytest

from testbed.bed import Bed, prepare


@pytest.fixture(scope="session")
def bed() -> Bed:
    return prepare()
