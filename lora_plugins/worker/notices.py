"""Saying at once that a load is over, where somebody waits for it: the step that reports it may go on for long.

Over a local socket of the engine core's process, by Python's `multiprocessing.connection`, which checks a key.
"""

from __future__ import annotations

from multiprocessing import ProcessError
from multiprocessing.connection import Client

from lora_plugins.log import logger
from lora_plugins.scheduler.messages import Notify, Report


def send(notify: Notify, report: Report) -> None:
    """Send a report; one that does not arrive costs its reader the rest of the step."""
    try:
        with Client(notify.address, authkey=notify.key) as connection:
            connection.send(report)
    except (OSError, EOFError, ProcessError) as error:
        logger.debug("The end of a load was not said at once: %s", error)
