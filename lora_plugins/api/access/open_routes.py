"""The routes that callers reach who are no administrators, with an access policy and without.

With a policy these are routes of vLLM 0.30 to 0.33. A route that a later release adds, or another endpoint plugin, is
an administrator's until the route stands here: the route may change the engine, or other tenants' work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Closed to all but administrators, also without a policy: routes of this package, routes of vLLM that change adapters,
# and in vLLM's development mode the route to every method of the workers.
_ADMINISTRATORS = ("/v1/loras", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc")

# These and the next name one model, which the policy checks, or none. These run the engine: a key's limits count them.
_RUNS_THE_ENGINE = """
/v1/completions /v1/chat/completions /v1/chat/completions/batch /v1/responses /v1/messages /cohere/v2/chat
/v1/audio/transcriptions /v1/audio/translations
/v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank
/generative_scoring /v1/systemone /v1/decisions /inference/v1/generate /invocations
"""
_USES_A_MODEL = f"""{_RUNS_THE_ENGINE}
/v1/completions/render /v1/completions/derender /v1/chat/completions/render /v1/chat/completions/derender
/v1/responses/render /v1/responses/ID/cancel /v1/messages/count_tokens /v1/messages/render /cohere/v2/chat/render
/tokenize /detokenize
"""
# `/metrics` also answers below it, for Prometheus; the pages of the documentation come with files of their own.
_READS = """
/v1/models /v1/models/REST /v1/responses/ID /tokenizer_info /health /load /version /metrics /metrics/REST
/docs /docs/oauth2-redirect /redoc /openapi.json /static/REST
"""


def _matching(routes: str) -> re.Pattern[str]:
    expressions = (re.escape(route).replace("ID", "[^/]+").replace("REST", ".*") for route in routes.split())
    return re.compile("|".join(expressions))


_WITH_POLICY = {
    "POST": _matching(_USES_A_MODEL + "/ping"),
    "GET": _matching(_READS + "/ping"),
    "HEAD": _matching(_READS + "/ping"),
    "WEBSOCKET": _matching("/v1/realtime"),
}
# What a key's limits count.
_COUNTED = {"POST": _matching(_RUNS_THE_ENGINE), "WEBSOCKET": _WITH_POLICY["WEBSOCKET"]}


def is_open(method: str, path: str, *, has_policy: bool) -> bool:
    """Whether every caller reaches a route; `path` is below the root path, and `method` is `WEBSOCKET` for those."""
    if has_policy:
        return _is_among(_WITH_POLICY, method, path)
    return not any(path == admin or path.startswith(f"{admin}/") for admin in _ADMINISTRATORS)


def is_counted(method: str, path: str) -> bool:
    """Whether a key's limits count a request of a route; arguments as of `is_open`."""
    return _is_among(_COUNTED, method, path)


def _is_among(by_method: Mapping[str, re.Pattern[str]], method: str, path: str) -> bool:
    routes = by_method.get(method)
    return routes is not None and routes.fullmatch(path) is not None
