"""What a replica reads from its server's metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_plugins.routing.residency import Report, Tier

RECORDED = Path(__file__).resolve().parents[1] / "observability" / "recorded" / "metrics.txt"


@pytest.fixture(autouse=True)
def _ray() -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")


def test_page_of_a_real_server_is_read() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from lora_plugins.ray.server_process import report_of

    page = RECORDED.read_text()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    places = {"gpu": Tier.SLOT, "cpu": Tier.HOST}
    loaded = [it for it in samples if it.name == "vllm:lora_adapter_loaded"]
    expected = {it.labels["adapter_name"]: places[it.labels["level"]] for it in loaded}
    assert expected
    report = report_of(page)
    assert report.adapters == expected
    assert report.capacity == next(int(it.value) for it in samples if it.name == "lora_plugins_host_max_adapters")


def test_names_are_unescaped_and_requests_added_up() -> None:
    from lora_plugins.ray.server_process import report_of

    page = (
        'vllm:lora_adapter_loaded{adapter_name="a\\"b\\\\c",engine="0",level="cpu"} 1.0\n'
        'vllm:lora_adapter_loaded{adapter_name="two",engine="0",level="cpu"} 1.0\n'
        'vllm:lora_adapter_loaded{adapter_name="two",engine="1",level="gpu"} 1.0\n'
        'vllm:num_requests_running{engine="0"} 3.0\n'
        'vllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0\n'
        'lora_plugins_held{engine="0"} 1.0\n'
        'lora_plugins_host_max_adapters{engine="0"} 12.0\n'
        'lora_plugins_host_max_adapters{engine="1"} 8.0\n'
    )
    assert report_of(page) == Report({'a"b\\c': Tier.HOST, "two": Tier.SLOT}, 8, 6)
