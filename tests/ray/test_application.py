"""The configuration file for clusters, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

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


def test_what_follows_two_dashes_is_for_vllm_serve() -> None:
    from lora_plugins.ray.__main__ import parser

    parsed = parser().parse_args(["--replicas", "2", "--port", "81", "--", "m", "--enable-lora", "--max-loras", "4"])
    assert (parsed.replicas, parsed.port) == (2, 81)
    assert parsed.arguments == ["m", "--enable-lora", "--max-loras", "4"]
