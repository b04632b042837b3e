"""A replica that takes part in Ray Serve's own model multiplexing too, and an ingress without it, to compare with."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ray import serve
from starlette.responses import Response

from lora_plugins.ray.ingress import Ingress
from lora_plugins.ray.replica import Call, Head, ServerGone, VllmReplica

PLACES = 12  # of benchmarks/routing/ray_serve.py


class MultiplexedReplica(VllmReplica):
    """Where the router says which adapter it is for, Ray is told that it is here, as its multiplexing wants it."""

    @serve.multiplexed(max_num_models_per_replica=PLACES)
    async def _loaded(self, name: str) -> str:
        return name  # the server loads it

    async def forward(self, call: Call) -> AsyncIterator[Head | bytes | ServerGone]:
        name = serve.get_multiplexed_model_id()
        if name:
            await self._loaded(name)
        async for part in super().forward(call):
            yield part


class IngressWithoutNames(Ingress):
    """Gives Ray no adapter's name: its default router then chooses by load alone."""

    async def _forward(self, call: Call, adapter: str) -> Response:
        return await super()._forward(call, "")
