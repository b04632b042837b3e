"""Errors as vLLM answers them; no path of the server is in what a client of inference is told."""

from __future__ import annotations

import pytest
from fastapi import HTTPException
from vllm.exceptions import VLLMClientError, VLLMNotFoundError

from lora_plugins.api.http_errors import hidden, http_error, without_paths
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    NoFreeSlot,
    OutOfMemory,
    SlowBody,
    SourceUnavailable,
)


@pytest.mark.parametrize("kind", [AdapterNotFound, IncompatibleAdapter, InvalidAdapter])
def test_an_error_of_an_adapter_is_vllms_own(kind):
    error = http_error(kind("x", adapter="sql"))
    assert isinstance(error, VLLMClientError)
    assert isinstance(error, VLLMNotFoundError) == (kind is AdapterNotFound)
    assert str(error) == f"[{kind.code}] adapter 'sql': found x."


@pytest.mark.parametrize(("kind", "status"), [(SourceUnavailable, 503), (NoFreeSlot, 503), (OutOfMemory, 507)])
def test_a_passing_error_says_when_to_retry(kind, status):
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


# --- without paths of the server


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no directory at /adapters", "no directory at <path>"),
        ("base model /data/llama-3.1/8b, served is /models/llama.v2", "base model <path>, served is <path>"),
        ("base model tiny (/models/tiny)", "base model tiny (<path>)"),
        ("served is '/models/tiny'; accepted", "served is '<path>'; accepted"),
        ("files missing ([Errno 2] No such file: '/a b/c.json')", "files missing ([Errno 2] No such file: '<path>')"),
        ('File "/x y/z.py"', 'File "<path>"'),
        ("it is at /a/b/.", "it is at <path>."),
        ("file:///srv/a", "<path>"),
        ("at 'file:///srv/a b'", "at '<path>'"),
        ("path=/x/y;/z", "path=<path>;<path>"),
        ("base model C:\\Users\\jane\\llama, served is x", "base model <path>, served is x"),
        ("names base model 'D:/jane doe/llama', served is x", "names base model '<path>', served is x"),
        (r"names base model '\\host\jane doe\llama'", "names base model '<path>'"),
        (r"no file at \\host\jane\llama.", "no file at <path>."),
    ],
)
def test_paths_are_hidden(text, shown):
    assert without_paths(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "base model someone/other-7b",
        "load it again with POST /v1/loras",
        "an input/output error",
        "s3://bucket/a/b and hf://acme/many and https://host/x",
        "lora_A and/or lora_B",
        "1 / 2",
        "no revision 'corp.com/sql' of an adapter 'user'",
        "tensor 'base_model.model.model.layers.0.q_proj.lora_A.weight'",
        "--max-lora-rank 128",
        "shape [8, 256]",
        r"the pattern '^layers\.\d+'",
    ],
)
def test_what_is_no_path_stays(text):
    assert without_paths(text) == text


def test_the_adapters_name_stays_as_it_was_asked_for():
    error = AdapterNotFound("x", expected="/a", remedy="see /b", adapter="/sql", file="/c/d")
    assert str(hidden(error)) == "[L002] adapter '/sql', file '<path>': found x; expected <path>. To fix: see <path>."
    assert str(error).count("<path>") == 0
    assert str(hidden(IncompatibleAdapter("x", adapter="team/sql"))) == "[L003] adapter 'team/sql': found x."


def test_place_is_for_the_log_and_never_for_clients():
    error = SourceUnavailable("x", adapter="sql", place="s3://bucket/loras/sql/ on http://s3.test:9000")
    assert str(error) == "[L006] adapter 'sql': found x at s3://bucket/loras/sql/ on http://s3.test:9000."
    assert str(hidden(error)) == "[L006] adapter 'sql': found x."


def test_the_connection_of_a_slow_body_ends():
    error = http_error(SlowBody("a body of which 1 bytes have come"))
    assert (error.status_code, error.headers["Connection"]) == (408, "close")
