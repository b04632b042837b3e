"""The endpoint plugin `lora_admin`: our routes on vLLM's API server, and what is served from its start."""

from __future__ import annotations

import asyncio
from typing import Any

from lora_plugins.errors import InvalidSettings
from lora_plugins.ledger import Patch
from lora_plugins.plugin_names import ADMIN
from lora_plugins.process import settings_of_server
from lora_plugins.server.refresh import look_out
from lora_plugins.server.restore import Start
from lora_plugins.server.served_file import ServedSet
from lora_plugins.vllm_patches.access import install
from lora_plugins.vllm_patches.serving_models import changes


class AdminPlugin:
    """What vLLM asks of an endpoint plugin (vllm/plugins/endpoint_plugins/interface.py, 0.30)."""

    name = ADMIN
    required_tasks = None

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def attach_router(self, app: Any) -> None:
        """Add the routes, and keep to the access policy if there is one.

        Raises:
            InvalidSettings: the policy cannot be right.
        """
        from lora_plugins.api.routes import router

        install(app, settings_of_server())
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Serve what is to be served from the start, and begin to look out for new versions.

        Raises:
            InvalidSettings: several API servers, of which each would know its own adapters only.
        """
        if engine_client is None:
            return  # the render server has no engine
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise InvalidSettings(
                f"--api-server-count {args.api_server_count} with lora_admin",
                expected="one API server, which knows all adapters",
                remedy="leave --api-server-count out, or lora_admin",
            )
        settings, known = settings_of_server(), changes(state.openai_serving_models)
        start = Start(
            known, settings, ServedSet.of_store(settings.store_dir, state.openai_serving_models.model_config.model)
        )
        if settings.preload_wait:
            await start.run()
            self._tasks.append(asyncio.create_task(start.bring_put_off()))
        else:
            self._tasks.append(asyncio.create_task(_start_beside(start)))
        if settings.refresh_s:
            self._tasks.append(asyncio.create_task(look_out(known, settings.refresh_s)))


async def _start_beside(start: Start) -> None:
    await start.run()
    await start.bring_put_off()


LEDGER = (
    Patch(
        """
        vllm.plugins.endpoint_plugins.interface:
            EndpointPlugin.attach_router(self, app)
            EndpointPlugin.init_state(self, engine_client, state, args)
        """,
        what="implemented; state.openai_serving_models is read",
        why="the routes of lora_admin, and what is served from the start",
        remove="never: this is the public interface",
    ),
)
