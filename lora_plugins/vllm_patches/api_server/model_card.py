"""`GET /v1/models/NAME`: the card of one model, which clients look at before their first request; vLLM has no route.

A name that a source has and nobody has asked for has a card too: nothing is fetched for it.

Touches:
    vllm.entrypoints.openai.models.serving: OpenAIServingModels{registry, lora_requests, model_config}
        OpenAIModelRegistry.show_available_models(self)
    vllm.entrypoints.serve.engine.protocol: ModelCard{id, root, parent}
Why: OpenAI's API has the route, and editors and gateways refuse a server without it.
Until: vLLM answers the route, and asks a plugin for adapters.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.adapter.mixture import canonical
from lora_plugins.api.http_errors import as_http
from lora_plugins.process import this_process
from lora_plugins.vllm_patches.api_server.base_serving import may_use
from lora_plugins.vllm_patches.api_server.server_lifecycle import planned_lifecycle

PATH = "/v1/models/{name:path}"


def card_of(base: Any, name: str, root: str | None = None) -> Any:
    """Return the card of an adapter of the base model with the card `base`."""
    return base.model_copy(update={"id": name, "root": root or name, "parent": base.id})


async def _show(models: Any, name: str) -> Any:
    """Return the card of a model that the caller may use.

    Raises:
        VLLMNotFoundError: no such model, as far as the caller may know.
    """
    from vllm.exceptions import VLLMNotFoundError

    name = canonical(name)
    cards = (await models.registry.show_available_models()).data  # the base model's alone, under each of its names
    base = next((card for card in cards if card.id == name), None)
    if base is not None:
        return base
    process = this_process()
    if may_use(name) and name not in process.resolver.store.blocks:
        served = models.lora_requests.get(name)
        if served is not None:
            lifecycle = planned_lifecycle(models)
            adapter = None if lifecycle is None else lifecycle.registry.get(name)
            return card_of(cards[0], name, (adapter and adapter.given_path) or served.lora_path)
        if process.settings.runtime_lora_updating and await process.resolver.has(name, models.model_config.model):
            return card_of(cards[0], name)
    raise VLLMNotFoundError(f"The model `{name}` does not exist.")


def add_route(app: Any) -> None:
    """Have an API server answer."""
    from starlette.responses import JSONResponse

    async def show_model(request: Any) -> Any:
        with as_http():
            card = await _show(request.app.state.openai_serving_models, request.path_params["name"])
        return JSONResponse(card.model_dump())

    app.add_route(PATH, show_model, methods=["GET"])
