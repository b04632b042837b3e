"""Tasks that run although nobody awaits them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.log import logger

_T = TypeVar("_T")
_tasks: set[asyncio.Task[Any]] = set()  # the event loop holds tasks by weak references only


def background(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Run `work` to its end, awaited or not; a failure is logged, and reaches a caller that awaits the task too."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        shown = None if isinstance(error, LoRAPluginsError) else error
        logger.error("Work in the background failed: %r", error, exc_info=shown)
