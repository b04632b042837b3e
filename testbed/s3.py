"""A real S3 API on loopback: moto's server in a separate process, and a bucket to put adapters into."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.process import announce_and_wait, child

REGION = "eu-central-1"
ACCESS_KEY = "testing"
SECRET_KEY = "testing-secret"
MIN_PART = 5 * 1024 * 1024


@dataclass(frozen=True)
class S3:
    """A running server. Buckets live until `reset`."""

    url: str
    pid: int
    _clients: list[Any] = field(default_factory=list, repr=False)

    def env(self, url: str | None = None, *, anonymous: bool = False) -> dict[str, str]:
        """What a client needs in its environment to talk to this server, or to a proxy of it at `url`."""
        keys = {} if anonymous else {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        return {
            **keys,
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
            # Nothing of the machine's own may be asked or read.
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    @property
    def client(self) -> Any:
        """A boto3 client for this server, made once."""
        if not self._clients:
            self._clients.append(make_client(self.url))
        return self._clients[0]

    def bucket(self, name: str = "adapters") -> Bucket:
        """The bucket `name`, created if it is not there."""
        with contextlib.suppress(self.client.exceptions.BucketAlreadyOwnedByYou):
            self.client.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
        return Bucket(name, self.client)

    def reset(self) -> None:
        """Forget every bucket; some milliseconds, so that one server serves a whole test session."""
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")) as answer:
            answer.read()


@dataclass(frozen=True)
class Bucket:
    """Objects of one bucket, changed past any proxy."""

    name: str
    client: Any = field(repr=False)

    def put(
        self, key: str, data: bytes, *, public: bool = False, part_size: int | None = None, checksum: str = ""
    ) -> str:
        """Create or replace an object and return its quoted ETag; in parts of `part_size`, it is no MD5 of the data.

        With parts, S3 keeps the `checksum` of the whole object; moto knows CRC32 and SHA256 without further packages.
        """
        extra = {"ACL": "public-read"} if public else {}
        if part_size is None:
            return str(self.client.put_object(Bucket=self.name, Key=key, Body=data, **extra)["ETag"])
        if part_size < MIN_PART:
            raise ValueError(f"part_size is {part_size}, S3 wants {MIN_PART} at least")
        kept = {"ChecksumAlgorithm": checksum, "ChecksumType": "FULL_OBJECT"} if checksum else {}
        upload = self.client.create_multipart_upload(Bucket=self.name, Key=key, **extra, **kept)["UploadId"]
        at = {"Bucket": self.name, "Key": key, "UploadId": upload}
        parts = [
            {
                "PartNumber": i,
                "ETag": self.client.upload_part(**at, PartNumber=i, Body=data[start : start + part_size])["ETag"],
            }
            for i, start in enumerate(range(0, len(data), part_size), 1)
        ]
        return str(self.client.complete_multipart_upload(**at, MultipartUpload={"Parts": parts})["ETag"])

    def put_many(self, prefix: str, files: Mapping[str, bytes], *, public: bool = False) -> dict[str, str]:
        """Put `files` below `prefix`; the ETags by file name."""
        return {name: self.put(f"{prefix.rstrip('/')}/{name}", data, public=public) for name, data in files.items()}

    def put_directory(self, prefix: str, directory: Path, *, public: bool = False) -> dict[str, str]:
        """Put every file below `directory` under `prefix`; the ETags by relative path."""
        files = {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        return self.put_many(prefix, files, public=public)

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())

    def list(self, prefix: str = "") -> dict[str, int]:
        """Sizes by key."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return {item["Key"]: int(item["Size"]) for page in pages for item in page.get("Contents", [])}

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def delete_prefix(self, prefix: str) -> None:
        for key in self.list(prefix):
            self.delete(key)


def make_client(url: str) -> Any:
    """A boto3 S3 client with the testbed's keys, path-style addresses, and no retries."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


@contextmanager
def s3_server() -> Iterator[S3]:
    """Run moto's S3 server on a free loopback port until the block ends."""
    with child("testbed.s3") as (port, process):
        s3 = S3(f"http://127.0.0.1:{port}", process.pid)
        try:
            yield s3
        finally:
            for client in s3._clients:
                client.close()


def _main() -> None:
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    announce_and_wait(server.get_host_and_port()[1])


if __name__ == "__main__":
    _main()
