"""The configuration file for clusters, the command line, and which names are the base model's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from lora_plugins.routing.residency import Report, Tier

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray" / "serve.yaml"


@pytest.fixture(autouse=True)
def _ray() -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")


def test_example_is_what_serve_and_the_application_read() -> None:
    from ray.serve.schema import ServeDeploySchema

    from lora_plugins.ray.application import Options, build

    config = ServeDeploySchema(**yaml.safe_load(EXAMPLE.read_text()))
    (application,) = config.applications
    options = Options(**application.args)
    assert application.import_path == "lora_plugins.ray.application:build"
    assert {deployment.name for deployment in application.deployments} <= {"vllm", "ingress"}
    built = build(options)
    assert built._bound_deployment.name == "ingress"


def test_unknown_option_is_refused() -> None:
    from lora_plugins.ray.application import Options

    with pytest.raises(ValueError, match="busy"):
        Options(arguments=["m"], busy=3)


def test_the_command_of_the_page_is_understood() -> None:
    """What follows two dashes is for `vllm serve`."""
    from lora_plugins.ray.__main__ import parser

    text = (EXAMPLE.parents[2] / "docs" / "guides" / "routing.md").read_text()
    command = re.search("^python -m lora_plugins.ray (.*)", text, re.MULTILINE)
    parsed = parser().parse_args(shlex.split(command[1]))
    assert (parsed.replicas, parsed.num_gpus) == (2, 1)
    assert parsed.arguments[1:] == ["--enable-lora", "--max-loras", "8", "--max-cpu-loras", "64"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["meta/llama", "--enable-lora"], ["meta/llama"]),
        (["/models/llama", "--served-model-name", "llama", "llama-3", "--port", "1"], ["llama", "llama-3"]),
        (["/models/llama", "--served_model_name=llama"], ["llama"]),
        (["--max-loras", "4", "--model", "llama"], ["llama"]),
    ],
)
def test_names_of_the_base_model_are_those_served(arguments: list[str], names: list[str]) -> None:
    from lora_plugins.ray.application import base_names

    assert base_names(arguments) == names


RECORDED = Path(__file__).resolve().parents[1] / "observability" / "recorded" / "metrics.txt"


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
