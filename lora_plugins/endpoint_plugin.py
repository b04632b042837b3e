"""The endpoint plugin `lora_admin`: our routes on vLLM's API server, and the adapters served from its start."""

from __future__ import annotations

import socket
from typing import Any

from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.lifecycle.follower import Follower
from lora_plugins.lifecycle.pushing import Pushes
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.served_file import ServedFile
from lora_plugins.plugin_names import ADMIN
from lora_plugins.process import this_process
from lora_plugins.vllm_patches.api_server.access import install
from lora_plugins.vllm_patches.api_server.server_lifecycle import lifecycle_of


class AdminPlugin:
    """The methods that vLLM calls on an endpoint plugin (vllm/plugins/endpoint_plugins/interface.py, 0.30).

    Touches:
        vllm.plugins.endpoint_plugins.interface:
            EndpointPlugin{attach_router(self, app), init_state(self, engine_client, state, args)}
    Why: the routes of lora_admin, and what is served from the start.
    Until: never: this is the public interface.
    """

    name = ADMIN
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add the routes, for administrators, and enforce the access policy if there is a policy.

        Raises:
            InvalidSettings: the policy cannot be right.
        """
        from lora_plugins.api.routes import router

        install(app, this_process())
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Serve the adapters of a start, and begin to poll for new versions.

        Raises:
            InvalidSettings: the file of declared adapters cannot be right.
        """
        if engine_client is None:
            return  # the render server has no engine
        process = this_process()
        if isinstance(process.role, Follower):
            await process.role.ready()
            return  # the leader answers the routes, and serves the adapters of a start
        models = state.openai_serving_models
        settings = process.settings
        lifecycle = state.lora_plugins_lifecycle = lifecycle_of(models)
        state.lora_plugins_pushes = Pushes(lifecycle)
        # Pods of a StatefulSet and restarted containers keep their names; several servers of a host differ by the port.
        replica = (
            settings.replica or f"{socket.gethostname()}:{getattr(args, 'uds', None) or getattr(args, 'port', '')}"
        )
        served = ServedFile.of_store(settings.store_dir, models.model_config.model, replica)
        served.prefers_living = settings.restore == "living"
        reconciler = state.lora_plugins_reconciler = Reconciler(lifecycle, settings, served, process.events)
        # Before the start, which may load for minutes: other replicas must see that this replica lives.
        background(served.keep())
        await reconciler.start()
        process.role.say_ready()  # followers wait for the leader's start
        background(reconciler.follow())
        if settings.refresh_s:
            background(reconciler.poll())
