"""Errors as vLLM answers them."""

from __future__ import annotations

import pytest

from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    NoFreeSlot,
    OutOfMemory,
    SourceUnavailable,
)


def test_not_found_is_vllms_404():
    from vllm.exceptions import VLLMNotFoundError

    error = http_error(AdapterNotFound("x", adapter="sql"))
    assert isinstance(error, VLLMNotFoundError)
    assert str(error) == "[L002] adapter 'sql': found x."


@pytest.mark.parametrize("kind", [IncompatibleAdapter, InvalidAdapter])
def test_a_refused_adapter_is_vllms_400(kind):
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    error = http_error(kind("x", adapter="sql"))
    assert isinstance(error, VLLMClientError)
    assert not isinstance(error, VLLMNotFoundError)
    assert str(error) == f"[{kind.code}] adapter 'sql': found x."


@pytest.mark.parametrize(("kind", "status"), [(SourceUnavailable, 503), (NoFreeSlot, 503), (OutOfMemory, 507)])
def test_a_passing_error_says_when_to_retry(kind, status):
    from fastapi import HTTPException

    error = http_error(kind("x"))
    assert isinstance(error, HTTPException)
    assert (error.status_code, error.detail) == (status, f"[{kind.code}] found x.")
    expected = {} if kind.retry_after_s is None else {"Retry-After": str(kind.retry_after_s)}
    assert error.headers == expected
    assert bool(expected) == (status == 503)


@pytest.mark.parametrize("kind", [AdapterNotFound, IncompatibleAdapter, InvalidAdapter, SourceUnavailable, OutOfMemory])
def test_only_administrators_are_told_paths(kind):
    error = kind(
        "no directory at '/a b/c'", expected="/data/base", remedy="look below /data", file="/d/e", adapter="sql"
    )

    def text(shown: Exception) -> str:
        return str(getattr(shown, "detail", shown))

    code = kind.code
    assert text(http_error(error)) == (
        f"[{code}] adapter 'sql', file '<path>': found no directory at '<path>'; expected <path>. "
        "To fix: look below <path>."
    )
    assert text(http_error(error, shows_paths=True)) == str(error)
