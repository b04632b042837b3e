"""Map errors of this package to vLLM's HTTP answers: the only place where errors become HTTP."""

from __future__ import annotations

from lora_plugins.api.hidden_paths import for_clients
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.ledger import Patch


def http_error(error: LoRAPluginsError, *, shows_paths: bool = False) -> Exception:
    """The exception that makes vLLM answer with the error's status and text.

    `shows_paths` is for administrators: other callers must not see paths of the server's files.
    """
    # Imported late: importing vLLM takes seconds, and only a server needs vLLM.
    from fastapi import HTTPException
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    text = str(error) if shows_paths else for_clients(error)
    if isinstance(error, AdapterNotFound):
        return VLLMNotFoundError(text)  # type: ignore[no-any-return]
    if error.http_status == 400:
        return VLLMClientError(text)  # type: ignore[no-any-return]
    # An HTTPException can carry Retry-After.
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return HTTPException(error.http_status, text, headers)


LEDGER = (
    Patch(
        "vllm.exceptions: VLLMNotFoundError VLLMClientError",
        what="raised for L002, and for L003 and L005",
        why="vLLM answers them with a 404 and a 400, with our text",
        remove="never: this is the public interface",
    ),
)
