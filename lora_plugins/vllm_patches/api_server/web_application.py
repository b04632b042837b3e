"""vLLM's web application: our metrics and our middleware on it.

Runs as an API server makes its application: vLLM calls `attach_router` of its metrics there, and nowhere else, so the
wrapper finds every application, whichever of our plugins is named.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.lifecycle.carrying import CarryToLeader
from lora_plugins.lifecycle.response import AnswerForAdapters
from lora_plugins.process import this_process
from lora_plugins.vllm_patches.api_server.metrics import serve_metrics
from lora_plugins.vllm_patches.api_server.model_card import add_route
from lora_plugins.vllm_patches.api_server.several_api_servers import FOLDER
from lora_plugins.vllm_patches.wrapping import wrap


def patch() -> None:
    """Have every API server of this process get our parts; a second call changes nothing."""
    from vllm.entrypoints.serve.instrumentator import metrics

    wrap(metrics, "attach_router", _attach_router)


def _attach_router(original: Any, app: Any) -> None:
    """Put our metrics behind `/metrics`, and add our middleware.

    Why: attach_router runs where /metrics is, in API servers only, before the application answers.
    Until: vLLM lets a plugin that has no endpoints add middleware.
    """
    original(app)
    process = this_process()
    process.app, process.folder = app, getattr(getattr(app.state, "args", None), FOLDER, None)
    serve_metrics(app, process)
    if process.is_resolver_registered or process.is_manager_patched:
        # The middleware added last is outside what was added before: a follower's requests go to the leader before
        # our other parts. vLLM adds CORS, authentication, request ids and --middleware later, so outside of ours.
        add_route(app)
        app.add_middleware(AnswerForAdapters, answer=_answer)
        if process.folder is not None:
            app.add_middleware(CarryToLeader, role=lambda: process.role, answer=_answer)


async def _answer(scope: Any, error: Exception) -> Any:
    """Return the application's own response to an exception."""
    from starlette.requests import Request

    if isinstance(error, LoRAPluginsError):
        error = http_error(error)
    # As Starlette looks handlers up: the nearest class first.
    handlers = scope["app"].exception_handlers
    handler = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
    return await handler(Request(scope), error)
