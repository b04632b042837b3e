"""What one process of vLLM has once, whichever of our plugins run in it: its events and its settings."""

from __future__ import annotations

import functools

from lora_plugins.events import Events
from lora_plugins.observability.logs import LogEvents
from lora_plugins.settings import Settings

LOG = LogEvents()
EVENTS = Events(LOG)


@functools.cache
def settings_of_server() -> Settings:
    """The settings of this process, read at the first call.

    Raises:
        InvalidSettings: a variable cannot be right.
    """
    return Settings.from_env()
