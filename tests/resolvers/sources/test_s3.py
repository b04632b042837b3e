"""What the AWS variables make of s3fs's options."""

from __future__ import annotations

import sys

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.resolvers.sources.object_store import object_source
from lora_plugins.resolvers.sources.s3 import s3_storage_options
from lora_plugins.settings import Settings


def test_storage_options_leave_the_rest_to_botocore() -> None:
    options = s3_storage_options({"AWS_REGION": "eu-west-1"})
    assert "endpoint_url" not in options
    assert options["client_kwargs"] == {"region_name": "eu-west-1"}
    assert "s3" not in options["config_kwargs"]
    assert options["config_kwargs"]["retries"] == {"total_max_attempts": 1}
    assert not options["anon"]


def test_requests_go_to_the_region_of_an_access_point() -> None:
    options = s3_storage_options({"AWS_REGION": "eu-west-1"}, "arn:aws:s3:us-west-2:123456789012:accesspoint/team")
    assert options["client_kwargs"] == {"region_name": "us-west-2"}
    assert options["config_kwargs"]["signature_version"] == "s3v4"


def test_a_server_without_the_library_of_aws_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt", None)
    with pytest.raises(InvalidSettings) as refused:
        object_source("s3://bucket/{lora_name}", Settings())
    assert "s3" in refused.value.remedy


def test_a_multi_region_access_point_is_signed_for_every_region() -> None:
    options = s3_storage_options({"AWS_REGION": "eu-west-1"}, "arn:aws:s3::123456789012:accesspoint/team.mrap")
    assert options["config_kwargs"]["signature_version"] == "s3v4a"
    assert options["client_kwargs"] == {"region_name": "eu-west-1"}


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_each_endpoint_variable_is_read(variable: str) -> None:
    assert s3_storage_options({variable: "https://h"})["endpoint_url"] == "https://h"
    assert s3_storage_options({variable: "https://h"})["config_kwargs"]["s3"] == {"addressing_style": "path"}
    hosted = s3_storage_options({variable: "https://h", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"})
    assert "s3" not in hosted["config_kwargs"]
    assert s3_storage_options({variable: "http://h", "AWS_ALLOW_HTTP": "1"})["endpoint_url"] == "http://h"


@pytest.mark.parametrize(
    "env",
    [
        {"AWS_ENDPOINT_URL": "http://h"},
        {"AWS_ENDPOINT_URL": "http://h", "AWS_ALLOW_HTTP": "false"},
        {"AWS_ENDPOINT_URL": "https://user:password@h"},
        {"AWS_ENDPOINT_URL": "h:9000"},
        {"AWS_ALLOW_HTTP": "perhaps"},
    ],
)
def test_impossible_aws_variables_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(InvalidSettings) as caught:
        s3_storage_options(env)
    assert "password" not in str(caught.value)
