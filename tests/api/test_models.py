"""What the admin API takes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lora_plugins.api.models import RollbackRequest
from lora_plugins.resolvers import versions


def test_a_digest_of_fewer_characters_than_the_store_is_searched_for_is_refused() -> None:
    digest = "ab" * 32
    shortest = digest[: versions._SHORTEST_PREFIX]
    assert RollbackRequest(digest=shortest).digest == shortest
    with pytest.raises(ValidationError):
        RollbackRequest(digest=shortest[:-1])
