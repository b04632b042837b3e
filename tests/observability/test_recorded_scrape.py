"""The recorded page, read as llm-d's router does (llm-d/llm-d-router#2792, and its lora-affinity scorer)."""

from __future__ import annotations

from tests.observability.recorded_scrape import PAGE, lora_shape, samples
from tests.observability.strict_page import check_page
from tests.observability.test_documents import METRICS

TEXT = PAGE.read_text()


def value(name: str) -> float:
    ((labels, found),) = samples(TEXT, name)
    assert (labels["model_name"], labels["engine"]) == ("llama", "0")
    return found


def test_recorded_page_is_read_by_strict_parsers() -> None:
    families = check_page(TEXT)
    assert len([name for name in families if name.startswith("vllm:")]) > 50, "with vLLM's own"
    assert len([name for name in families if name.startswith("lora_plugins_")]) > 30


def test_router_reads_where_each_adapter_is() -> None:
    adapters = {}
    for labels, present in samples(TEXT, "vllm:lora_adapter_loaded"):
        assert present == 1
        adapters[labels["adapter_name"]] = (labels["level"], labels["pinned"], int(labels["rank"]))
    assert adapters == {
        "sql": ("gpu", "true", 8),
        "stable": ("gpu", "false", 16),
        "team/poet": ("cpu", "false", 8),
        "chat": ("cpu", "false", 16),
    }
    assert value("vllm:num_gpu_loaded_lora_adapters") == 2
    assert value("vllm:num_cpu_loaded_lora_adapters") == 4
    assert value("vllm:max_gpu_lora_adapters") == 2


def test_router_reads_that_held_requests_wait() -> None:
    assert value("vllm:num_requests_running") == 4
    assert value("vllm:num_requests_waiting") == 3
    assert value("lora_plugins_held") == 3
    latest, _ = max(samples(TEXT, "vllm:lora_requests_info"), key=lambda one: one[1])
    # vLLM names no adapter of a request that has not run, with or without us: the events come with the first output.
    assert latest["waiting_lora_adapters"] == latest["running_lora_adapters"] == "stable"
    assert latest["max_lora"] == "2"


def test_recorded_metrics_are_those_of_today() -> None:
    for name, (kind, labels) in lora_shape(TEXT).items():
        if name == "vllm:lora_requests_info":
            continue
        known = METRICS.get(name) or METRICS[f"{name}_total"]
        assert (kind, labels - {"le"}) == (known[0], known[1]), name
