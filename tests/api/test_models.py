"""What the admin API takes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lora_plugins.adapter.names import MIN_PREFIX
from lora_plugins.api.models import RollbackRequest


def test_a_digest_that_is_too_short_is_refused() -> None:
    digest = "ab" * 32
    shortest = digest[:MIN_PREFIX]
    assert RollbackRequest(digest=shortest).digest == shortest
    with pytest.raises(ValidationError):
        RollbackRequest(digest=shortest[:-1])
