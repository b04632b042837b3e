"""The benchmark server answers real S3 clients as S3 does, from files and from memory, and counts."""

from __future__ import annotations

import os

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from testbed.ranges import range_server

DATA = os.urandom(3_000_001)


def client(url: str):
    config = Config(signature_version=UNSIGNED, s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    return boto3.client("s3", endpoint_url=url, region_name="eu-central-1", config=config)


@pytest.fixture(scope="module", params=["directory", "memory"])
def server(request, tmp_path_factory):
    files = {"b/sql/adapter_model.safetensors": DATA, "b/sql/adapter_config.json": b"{}", "b/a b+c/ü&.txt": b"1"}
    if request.param == "memory":
        with range_server(blobs=files) as running:
            yield running
        return
    root = tmp_path_factory.mktemp("objects")
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    with range_server(root) as running:
        yield running


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"Key": "sql/none"}, "NoSuchKey"),
        ({"Key": "sql/adapter_config.json", "Range": "bytes=2-"}, "InvalidRange"),
        ({"Key": "sql/adapter_config.json", "IfMatch": '"other"'}, "PreconditionFailed"),
        ({"Key": "../../etc/passwd"}, "NoSuchKey"),
    ],
)
def test_refusals_have_the_codes_of_s3(server, arguments, code):
    with pytest.raises(ClientError) as caught:
        client(server.url).get_object(Bucket="b", **arguments)
    assert caught.value.response["Error"]["Code"] == code


def test_requests_and_bytes_are_counted(server):
    server.reset()
    client(server.url).get_object(Bucket="b", Key="sql/adapter_model.safetensors", Range="bytes=0-99")["Body"].read()
    client(server.url).list_objects_v2(Bucket="b")
    stats = server.stats()
    assert (stats["requests"], stats["bytes"], stats["GET"], stats["LIST"], stats["HEAD"]) == (2, 100, 1, 1, 0)
    assert stats["GET /b/sql/adapter_model.safetensors"] == 1


def test_a_replaced_file_has_another_etag(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "k").write_bytes(b"1")
    with range_server(tmp_path) as server:
        first = client(server.url).head_object(Bucket="b", Key="k")["ETag"]
        (tmp_path / "b" / "k").write_bytes(b"2")
        assert client(server.url).head_object(Bucket="b", Key="k")["ETag"] != first
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
