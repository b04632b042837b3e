"""The header that says that an adapter was trained on another base model."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from lora_plugins.lifecycle.response import HEADER, WARNING_HEADER, present
from tests.lifecycle.test_response_digest import NEW, OLD, client_of


def asked(*versions: tuple[str | None, tuple[str, ...]], status: int = 200) -> Response:
    async def endpoint(request: Request) -> Response:
        for digest, warnings in versions:
            present().note_version(digest, warnings=warnings)
        return JSONResponse({}, status)

    client: TestClient = client_of(endpoint)
    return client.post("/")  # type: ignore[return-value]


def test_an_answer_says_its_warning() -> None:
    seen = asked((OLD, ("trained on another",)))
    assert (seen.headers[HEADER], seen.headers[WARNING_HEADER]) == (OLD, "trained on another")


def test_without_a_warning_there_is_no_header() -> None:
    assert WARNING_HEADER not in asked((OLD, ())).headers
    assert WARNING_HEADER not in asked().headers


def test_several_versions_say_each_warning_once() -> None:
    assert asked((OLD, ("one",)), (NEW, ("two",)), (OLD, ("one",))).headers[WARNING_HEADER] == "one; two"


@pytest.mark.parametrize("status", [400, 404, 503])
def test_an_error_says_no_warning(status: int) -> None:
    assert WARNING_HEADER not in asked((OLD, ("trained on another",)), status=status).headers


def test_the_header_is_one_line_of_ascii() -> None:
    said = asked((OLD, ("a\r\nx-other: é\u2028" + "long " * 1000,))).headers
    assert said[WARNING_HEADER].startswith(r"a\r\nx-other: \xe9\u2028long")
    assert len(said[WARNING_HEADER]) == 1000
    assert "x-other" not in said
