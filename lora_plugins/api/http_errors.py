"""Map errors of this package to vLLM's HTTP answers: the only place where errors become HTTP.

Runs in the API server, and in an ingress of Ray Serve. Clients who only ask for completions see no paths of the server:
`hidden` takes them out of an error's texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError

HIDDEN = "<path>"

# In quotes a path may have spaces. /v1/… is a route of the server, which remedies name.
_QUOTED = re.compile(r"""(?P<quote>['"])(?:(?:file:)?/(?!v1/)|[A-Za-z]:[\\/]|\\\\)[^'"]*(?P=quote)""")
_WINDOWS = re.compile(r"""(?<!\S)(?:[A-Za-z]:[\\/]|\\\\)[^\s'"();,]+(?<![.:])""")
_BARE = re.compile(r"""(?<![\w.~/<>:-])(?:file:/*)?/(?!v1/)[^\s'"/();,]+(?:/[^\s'"/();,]+)*/?(?<![.:])""")


def http_error(error: LoRAPluginsError, *, shows_paths: bool = False) -> Exception:
    """The exception that makes vLLM answer with the error's status and text.

    `shows_paths` is for administrators: other callers must not see paths of the server's files.

    Why: vLLM answers `VLLMNotFoundError` and `VLLMClientError` with a 404 and a 400, with our text.
    Until: never: this is the public interface.
    """
    # Imported late: importing vLLM takes seconds, and only a server needs vLLM.
    from fastapi import HTTPException
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    text = str(error if shows_paths else hidden(error))
    if isinstance(error, AdapterNotFound):
        return VLLMNotFoundError(text)  # type: ignore[no-any-return]
    if error.http_status == 400:
        return VLLMClientError(text)  # type: ignore[no-any-return]
    return HTTPException(error.http_status, text, headers_of(error))


def headers_of(error: LoRAPluginsError) -> dict[str, str]:
    """The headers of an error's answer, which only an HTTPException among vLLM's errors can carry."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.http_status == 408:
        headers["Connection"] = "close"  # the rest of a slow body is not waited for
    return headers


def body_of(error: LoRAPluginsError, status: int | None = None) -> dict[str, Any]:
    """The body of an error: as vLLM writes errors, with the error's own fields under `lora_plugins`, for programs.

    `status` is the answer's, where it is not the error's own.
    """
    http = HTTPStatus(status or error.http_status)
    said = {"message": str(error), "type": http.phrase, "param": None, "code": http.value}
    return {"error": {**said, "lora_plugins": {"code": error.code, **error.plain()}}}


@contextmanager
def as_http(*, shows_paths: bool = False) -> Iterator[None]:
    """Inside, errors of this package become HTTP, as `http_error` says."""
    try:
        yield
    except LoRAPluginsError as error:
        raise http_error(error, shows_paths=shows_paths) from None


def without_paths(text: str) -> str:
    """The text with `<path>` in the place of each absolute path and `file://` URI."""
    text = _QUOTED.sub(rf"\g<quote>{HIDDEN}\g<quote>", text)
    return _BARE.sub(HIDDEN, _WINDOWS.sub(HIDDEN, text))


def hidden(error: LoRAPluginsError) -> LoRAPluginsError:
    """The error without the server's paths and places; its adapter's name stays as the client has written it."""
    # Rebuild the error from its fields, because the name of an adapter may look like a path and must stay.
    fields = {name: text if name == "adapter" else without_paths(text) for name, text in error.fields().items()}
    return type(error)(**{**fields, "place": ""})
