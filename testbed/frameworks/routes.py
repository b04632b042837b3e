"""`vllm serve` with the routes that frameworks add to it: they call vLLM's objects in the server's own process.

Its `main` takes the arguments of `vllm`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

IN_PLACE_ROUTE = "/frameworks/load_in_place"
OWN_TABLE_ROUTE = "/frameworks/load_into_table"


def router() -> APIRouter:
    routes = APIRouter()
    routes.post(IN_PLACE_ROUTE)(load_in_place)
    routes.post(OWN_TABLE_ROUTE)(load_into_table)
    return routes


async def load_in_place(request: Request) -> JSONResponse:
    """As prime-rl's: vLLM's handler with `load_inplace`, which the stored request then loses."""
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    models = request.app.state.openai_serving_models
    asked = LoadLoRAAdapterRequest(**await request.json(), load_inplace=True)
    answer = await models.load_lora_adapter(asked)
    stored = models.lora_requests.get(asked.lora_name)
    if stored is not None:
        stored.load_inplace = False
    if hasattr(answer, "error"):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    return JSONResponse({"status": "ok"})


async def load_into_table(request: Request) -> JSONResponse:
    """As SkyRL's: `add_lora` with `load_inplace`, then the request is put into vLLM's table of names."""
    from vllm.lora.request import LoRARequest

    asked, models = await request.json(), request.app.state.openai_serving_models
    name = asked["lora_name"]
    async with models.lora_resolver_lock[name]:
        known = models.lora_requests.get(name)
        number = models.lora_id_counter.inc(1) if known is None else known.lora_int_id
        lora = LoRARequest(name, number, asked["lora_path"], load_inplace=True)
        await models.engine_client.add_lora(lora)
        lora.load_inplace = False
        models.lora_requests[name] = lora
    return JSONResponse({"status": "ok", "lora_int_id": number})


def main() -> None:
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.entrypoints.launchers.api_server import entry

    original: Any = entry.build_app

    def build_app(*args: Any, **kwargs: Any) -> Any:
        app = original(*args, **kwargs)
        app.include_router(router())
        return app

    entry.build_app = build_app
    vllm_main()
