"""Run by test_plugin.py: each scenario is a fork of a process that has imported vLLM.

Reads scenarios as JSON from the file that it is called with, one a line: `name` or names of the entry points, `env`,
`order` ("ours last" or "ours first"), `times`, how often the loaded functions are called, and perhaps `vllm`, the
directory of another vLLM's metadata, which is then the installed one. Writes the outcome of each, one a line.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path

# What is slow to import, and neither of the two entry points' modules.
import aiobotocore.session  # noqa: F401
import prometheus_fastapi_instrumentator  # noqa: F401
import s3fs  # noqa: F401
import stamina  # noqa: F401
import vllm.entrypoints.openai.api_server
import vllm.entrypoints.openai.models.serving as serving
import vllm.entrypoints.serve.exception_handling.register as handlers
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group


def discovered(name: str, order: str) -> list[importlib.metadata.EntryPoint]:
    """The real entry points of this name, or of several, in the order in which vLLM is to discover them."""
    points = {
        point.value: point
        for point in importlib.metadata.entry_points(group=DEFAULT_PLUGINS_GROUP)
        if point.name in name.split(",")
    }
    found = sorted(points.values(), key=lambda point: point.value.startswith("lora_plugins."))
    return found if order == "ours last" else found[::-1]


def outcome_of(scenario: dict[str, object]) -> dict[str, object]:
    os.environ.update(scenario["env"])
    if scenario["vllm"]:
        from lora_plugins.vllm_patches import vllm_sources as sources

        sources.installed = lambda: Path(scenario["vllm"])
    points = discovered(scenario["name"], scenario["order"])
    found = importlib.metadata.entry_points
    importlib.metadata.entry_points = lambda group: points if group == DEFAULT_PLUGINS_GROUP else found(group=group)
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("vllm.lora_plugins").addHandler(handler)
    untouched = serving.OpenAIServingModels.__init__, handlers.http_exception_handler
    result: dict[str, object] = {}
    try:
        for _ in range(scenario["times"]):
            for function in load_plugins_by_group(DEFAULT_PLUGINS_GROUP).values():
                function()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["warned"] = warned
    resolvers = LoRAResolverRegistry.resolvers
    result["registered"] = {name: f"{type(item).__module__}.{type(item).__name__}" for name, item in resolvers.items()}
    result["are_resolvers"] = all(isinstance(item, LoRAResolver) for item in resolvers.values())
    ours = [item for item in resolvers.values() if hasattr(item, "process")]
    result["sources"] = [str(source) for item in ours for source in item.process.resolver.sources]
    now = serving.OpenAIServingModels.__init__, handlers.http_exception_handler
    result["untouched"] = now == untouched
    result["wrapped_once"] = [getattr(wrapped, "__wrapped__", None) for wrapped in now] == list(untouched)
    return result


def main() -> None:
    gc.collect()
    gc.freeze()  # else the first collection of each child copies all of it
    for line in Path(sys.argv[1]).read_text().splitlines():
        sys.stdout.flush()
        child = os.fork()
        if not child:
            print(json.dumps(outcome_of(json.loads(line))), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
