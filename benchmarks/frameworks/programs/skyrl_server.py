"""`vllm serve` with the routes of SkyRL's own server; its `main` takes the arguments of `vllm`.

SkyRL 0.3.0's own start imports a module that vLLM 0.32 has moved; its routes are the ones it would add.
"""

from __future__ import annotations

import sys
import typing
from types import SimpleNamespace
from typing import Any

import typing_extensions

from testbed.frameworks.packages import FOLDER


def main() -> None:
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment] # else Pydantic wants Python 3.12 of it
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.entrypoints.launchers.api_server import entry

    sys.path.insert(0, str(FOLDER))
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

    original: Any = entry.build_app

    def build_app(*args: Any, **kwargs: Any) -> Any:
        app = original(*args, **kwargs)

        def reset_prefix_cache(**more: Any) -> Any:
            return app.state.engine_client.reset_prefix_cache(**more)  # which the app has later than its routes

        engine = SimpleNamespace(reset_prefix_cache=reset_prefix_cache)
        VLLMServerActor._add_custom_endpoints(app, engine, SimpleNamespace(enable_lora=True))
        return app

    entry.build_app = build_app
    vllm_main()
