"""The benchmark server answers real S3 clients as S3 does, from files and from memory, and counts."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import boto3
import pytest
import s3fs
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


def test_boto3_reads_ranges_heads_and_lists(server):
    s3 = client(server.url)
    key = "sql/adapter_model.safetensors"
    head = s3.head_object(Bucket="b", Key=key)
    part = s3.get_object(Bucket="b", Key=key, Range="bytes=10-19", IfMatch=head["ETag"])
    assert head["ContentLength"] == len(DATA)
    assert part["ContentRange"] == f"bytes 10-19/{len(DATA)}"
    assert part["Body"].read() == DATA[10:20]
    assert s3.get_object(Bucket="b", Key=key, Range="bytes=-5")["Body"].read() == DATA[-5:]
    assert s3.get_object(Bucket="b", Key=key, Range="bytes=3000000-")["Body"].read() == DATA[-1:]
    assert s3.get_object(Bucket="b", Key=key)["Body"].read() == DATA
    listed = s3.list_objects_v2(Bucket="b", Prefix="sql/")["Contents"]
    assert [(f["Key"], f["Size"]) for f in listed] == [("sql/adapter_config.json", 2), (key, len(DATA))]
    assert listed[1]["ETag"] == head["ETag"]


def test_keys_with_odd_characters_survive_listing_and_reading(server):
    assert client(server.url).get_object(Bucket="b", Key="a b+c/ü&.txt")["Body"].read() == b"1"
    assert client(server.url).list_objects_v2(Bucket="b", Prefix="a ")["Contents"][0]["Key"] == "a b+c/ü&.txt"


def test_delimiter_and_pages(server):
    s3 = client(server.url)
    folders = s3.list_objects_v2(Bucket="b", Delimiter="/")["CommonPrefixes"]
    assert [f["Prefix"] for f in folders] == ["a b+c/", "sql/"]
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="b", PaginationConfig={"PageSize": 1})
    assert [item["Key"] for page in pages for item in page["Contents"]] == [
        "a b+c/ü&.txt",
        "sql/adapter_config.json",
        "sql/adapter_model.safetensors",
    ]
    assert s3.list_objects_v2(Bucket="b", Prefix="none/")["KeyCount"] == 0


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


def test_s3fs_fetches_a_directory(server, tmp_path):
    fs = s3fs.S3FileSystem(anon=True, endpoint_url=server.url, skip_instance_cache=True)
    fs.get("b/sql", str(tmp_path / "out"), recursive=True)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == DATA
    assert not fs.exists("b/other")


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


def test_latency_and_speed_per_connection():
    with range_server(blobs={"b/k": b"x" * 400_000}, latency_s=1.0, bytes_per_s=2_000_000) as server:
        started = time.monotonic()
        client(server.url).get_object(Bucket="b", Key="k")["Body"].read()
        assert time.monotonic() - started > 1.15
        started = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            reads = [pool.submit(read, server.url, i % 4 * 100_000) for i in range(16)]
        assert sum(r.result() for r in reads) == 1_600_000
        assert time.monotonic() - started < 16 * 1.0, "as one after the other takes longer"


def read(url: str, start: int) -> int:
    answer = client(url).get_object(Bucket="b", Key="k", Range=f"bytes={start}-{start + 99_999}")
    return len(answer["Body"].read())
