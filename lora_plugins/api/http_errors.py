"""The errors of this package as vLLM's API server answers them: the one place where they become HTTP."""

from __future__ import annotations

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError


def http_error(error: LoRAPluginsError) -> Exception:
    """The exception that makes vLLM answer with our status and text (the one place where errors meet HTTP)."""
    from fastapi import HTTPException
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    if isinstance(error, AdapterNotFound):
        return VLLMNotFoundError(str(error))  # type: ignore[no-any-return]
    if error.http_status == 400:
        return VLLMClientError(str(error))  # type: ignore[no-any-return]
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return HTTPException(error.http_status, str(error), headers)
