"""The response to the present request, as the middleware of an API server has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lora_plugins.lifecycle import response as response_module
from lora_plugins.lifecycle.response import Response


@pytest.fixture
def response() -> Iterator[Response]:
    present = Response()
    token = response_module._present.set(present)
    yield present
    response_module._present.reset(token)
