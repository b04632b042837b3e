"""A real server's `/metrics`, recorded for those who write routers; `tests/e2e/test_recorded_scrape.py` records it."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).parent / "recorded" / "metrics.txt"


def lora_shape(page: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of each metric that says something of adapters, ours and vLLM's, that has any series.

    Without when each was created, which `prometheus_client` adds.
    """
    return {
        family.name: (family.type, frozenset().union(*(sample.labels for sample in family.samples)))
        for family in text_string_to_metric_families(page)
        if family.samples and "lora" in family.name and not family.name.endswith("_created")
    }


def samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each series of a gauge."""
    families = [family for family in text_string_to_metric_families(page) if family.name == name]
    return [(dict(sample.labels), sample.value) for family in families for sample in family.samples]
