"""The series that vLLM's own logger of metrics makes, and which of them are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats

from lora_plugins.vllm_patches.api_server.metrics import MOST_SERIES, NAME, forget_old_series
from tests.vllm_patches.engine_bed import vllm_config


@pytest.fixture
def logger(base: Path) -> Iterator[Any]:
    yield PrometheusStatLogger(vllm_config(base))
    unregister_vllm_metrics()


def record(logger: Any, running: str) -> None:
    logger.record(SchedulerStats(running_lora_adapters=dict.fromkeys(running.split(","), 1)), None)


def series() -> dict[str, float]:
    forget_old_series()
    found = next(metric for metric in REGISTRY.collect() if metric.name == NAME)
    return {sample.labels["running_lora_adapters"]: sample.value for sample in found.samples}


def test_sets_that_ran_long_ago_lose_their_series(logger: Any) -> None:
    for i in range(3 * MOST_SERIES):
        record(logger, f"sql-{i},chat")
    assert list(series()) == [f"sql-{i},chat" for i in range(2 * MOST_SERIES, 3 * MOST_SERIES)]


def test_set_that_runs_again_is_the_latest(logger: Any) -> None:
    record(logger, "first")
    for i in range(MOST_SERIES - 1):
        record(logger, f"sql-{i}")
    record(logger, "first")
    record(logger, "one-more")
    found = series()
    assert "first" in found
    assert "sql-0" not in found
    assert max(found, key=found.__getitem__) == "one-more"
