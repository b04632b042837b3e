"""A bounded `vllm:lora_requests_info`: vLLM makes a series for each set of adapters that ran or waited together.

It removes none of them, so a server of many adapters, and each scrape of it, grows for ever.
"""

from __future__ import annotations

from prometheus_client import REGISTRY, Gauge

from lora_plugins.ledger import Patch
from lora_plugins.observability.latest_series import keep_latest

NAME = "vllm:lora_requests_info"
# Routers read the one that was set last; some more, for who looks at a moment that has just passed.
MOST_SERIES = 32


def forget_old_series() -> None:
    """Remove those of sets that ran long ago; to be called before a scrape, in the event loop that sets them.

    Nothing happens where several API servers count in files, from which no series can be removed.
    """
    gauge = REGISTRY._names_to_collectors.get(NAME)  # noqa: SLF001 - as in `vllm_patches.metrics`
    if type(gauge) is Gauge:
        keep_latest(gauge, MOST_SERIES)


LEDGER = (
    Patch(
        """
        vllm.v1.metrics.loggers:
            PrometheusStatLogger.record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        """,
        what="before a scrape, all series of the gauge vllm:lora_requests_info but the 32 set last are removed. Relied "
        "on: record sets each to the time",
        why="vLLM makes one for each set of adapters and removes none: 2,000 after 10 minutes of the soak, 420 kB in "
        "each scrape, which routers do every 50 ms",
        remove="vLLM bounds them, or has a series for each adapter in their place",
    ),
)
