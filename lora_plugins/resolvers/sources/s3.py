"""S3 for `object_store.py`: options from the environment, one LIST per adapter, and ranges by `get_object`.

Runs on fsspec's loop thread of an API server. In go `s3://` URIs; out come an adapter's files with sizes and ETags, and
a reader of ranges of the files. All requests use the client of s3fs, so that botocore does credentials, signing, TLS
and proxies; errors are botocore's, which `remote_failures.py` knows.
"""

from __future__ import annotations

import asyncio
import os.path
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import fsspec

from lora_plugins.adapter.chat import CHAT_FILES, TOOLS_FILE
from lora_plugins.adapter.weight_files import INDEX_FILE, MAX_INDEX_BYTES, shards_of
from lora_plugins.errors import InvalidSettings
from lora_plugins.resolvers.sources.checksums import Checksum
from lora_plugins.resolvers.sources.fsspec import BUFFER_BYTES, Answer, check_protocol, write_range
from lora_plugins.resolvers.sources.ranges import RangeReader, Write
from lora_plugins.resolvers.sources.remote_failures import BrokenAnswer, FailureKind, ObjectChanged, diagnose
from lora_plugins.resolvers.sources.source import OWN_FILES, SourceFile, choose_files, needs_shards
from lora_plugins.resolvers.sources.uri import region_of, split_bucket

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
# Server-side encryptions under which an object's ETag is no MD5.
_NOT_MD5 = ("aws:kms", "aws:kms:dsse", "aws:fsx")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_FLAGS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off", ""), False)


def s3_storage_options(env: Mapping[str, str], bucket: str = "", *, answer_s: float = 0.0) -> dict[str, Any]:
    """s3fs's `storage_options` for the `AWS_*` variables of `env`; of an access point, its own region counts.

    One answer may take `answer_s` seconds, and no less than `READ_TIMEOUT_S`.

    Understood: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_ENDPOINT; AWS_REGION, AWS_DEFAULT_REGION; AWS_ALLOW_HTTP;
    AWS_S3_FORCE_PATH_STYLE, AWS_VIRTUAL_HOSTED_STYLE_REQUEST (path-style by default where an endpoint is set);
    AWS_SKIP_SIGNATURE; AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN. Everything else, profiles
    and instance metadata included, is left to botocore. The clients' own retries are off, because `retries.py` retries.

    Raises:
        InvalidSettings: an endpoint that is no URL, carries a password, or is plain HTTP without AWS_ALLOW_HTTP.
    """
    endpoint = next((env[name] for name in _ENDPOINTS if env.get(name)), None)
    allow_http = bool(_flag(env, "AWS_ALLOW_HTTP"))
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    path_style = _flag(env, "AWS_S3_FORCE_PATH_STYLE")
    if path_style is None:
        hosted = _flag(env, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
        # Own endpoints (MinIO, Ceph) often have no DNS name for each bucket.
        path_style = endpoint is not None if hosted is None else not hosted
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": max(READ_TIMEOUT_S, answer_s),
        # Retries of two layers would multiply.
        "retries": {"total_max_attempts": 1},
        "signature_version": "s3v4",
        # By default botocore would ask for checksums that many S3-compatible stores do not know.
        "response_checksum_validation": "when_required",
        "request_checksum_calculation": "when_required",
    }
    if path_style:
        config["s3"] = {"addressing_style": "path"}
    options: dict[str, Any] = {"config_kwargs": config, "anon": bool(_flag(env, "AWS_SKIP_SIGNATURE"))}
    of_access_point = region_of(bucket)
    if of_access_point == "" and not options["anon"]:
        config["signature_version"] = "s3v4a"  # valid in every region
    region = of_access_point or region
    if region:
        options["client_kwargs"] = {"region_name": region}
    if endpoint is not None:
        _check_endpoint(endpoint, allow_http=allow_http)
        options["endpoint_url"] = endpoint
    if env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
        options |= {"key": env["AWS_ACCESS_KEY_ID"], "secret": env["AWS_SECRET_ACCESS_KEY"]}
        if env.get("AWS_SESSION_TOKEN"):
            options["token"] = env["AWS_SESSION_TOKEN"]
    return options


class S3Files:
    """Lists and reads adapters in S3; every method runs on fsspec's loop.

    Raises:
        InvalidSettings: a package for S3 is not installed.
    """

    rechecks = False  # every range asks for the located ETag

    def __init__(self, storage_options: Mapping[str, Any]) -> None:
        check_protocol("s3")
        self._options = {"use_listings_cache": False, "skip_instance_cache": True, **storage_options}
        config = self._options.get("config_kwargs", {})
        # aiobotocore's configuration takes the class of its sessions; botocore's has no such option.
        self._options["config_kwargs"] = {**config, "http_session_cls": _staying_session()}
        self._filesystem: Any = None

    @property
    def endpoint(self) -> str:
        """The endpoint that the environment names, without a client's additions; empty for AWS's own."""
        url = urlsplit(self._options.get("endpoint_url") or "")
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}" if url.netloc else ""

    @property
    def has_static_token(self) -> bool:
        """Whether the environment's own AWS_SESSION_TOKEN signs, which nobody can renew in a running process."""
        return "token" in self._options

    async def find(self, uri: str) -> list[SourceFile]:
        """The adapter files directly below `uri`, by one LIST; by HEADs where listing is denied."""
        client = await self._client()
        bucket, prefix = split_bucket(uri)
        try:
            return await _list(client, bucket, f"{prefix}/")
        except Exception as error:
            # The right to read objects does not include the right to list.
            if diagnose(error).kind is not FailureKind.DENIED:
                raise
            return await _find_without_list(client, bucket, f"{prefix}/", error)

    async def list_below(self, uri: str) -> list[str]:
        """The URIs of all objects below `uri`, by as many LISTs as needed."""
        bucket, prefix = split_bucket(uri)
        pages = _pages(await self._client(), {"Bucket": bucket, "Prefix": f"{prefix}/" if prefix else ""})
        return [f"s3://{bucket}/{item['Key']}" async for page in pages for item in page.get("Contents", [])]

    async def reader(self, uri: str, checked: Sequence[SourceFile]) -> RangeReader:
        """A reader of the files below `uri`, with checksums of the `checked` files.

        Costs a HEAD for each file whose ETag is no MD5: LISTs have no checksums, and neither have answers with a range.
        """
        client = await self._client()
        bucket, prefix = split_bucket(uri)
        found = await asyncio.gather(*(_checksum(client, bucket, prefix, file) for file in checked))
        checksums = {file.name: checksum for file, checksum in zip(checked, found, strict=True) if checksum}

        async def read(file: SourceFile, start: int, end: int, write: Write) -> None:
            """Stream a range by `get_object`, under the condition of the located ETag."""
            asked = {"Bucket": bucket, "Key": f"{prefix}/{file.name}", "Range": f"bytes={start}-{end - 1}"}
            answer = await client.get_object(**asked, **_if_match(file))
            body = answer["Body"]
            async with body:
                is_encrypted = answer.get("ServerSideEncryption") in _NOT_MD5 or "SSECustomerAlgorithm" in answer
                if is_encrypted and checksums.get(file.name) == Checksum.of_etag(file.etag):
                    checksums.pop(file.name, None)
                status, place = answer["ResponseMetadata"]["HTTPStatusCode"], answer.get("ContentRange")
                pieces = body.iter_chunks(BUFFER_BYTES)
                await write_range(file, start, end, write, Answer(status, answer.get("ETag"), place, pieces))

        return RangeReader(read, checksums)

    def forget_credentials(self) -> None:
        """Have the next client read the credentials again, from the shared file or wherever botocore finds them."""
        self._filesystem = None

    async def _client(self) -> Any:
        if self._filesystem is None:
            self._filesystem = fsspec.filesystem("s3", **self._options)
        return await self._filesystem.set_session()


@cache
def _staying_session() -> Any:
    """Aiobotocore's class of sessions without redirects, which would lead to origins that no operator has named."""
    from aiobotocore.httpsession import AIOHTTPSession

    class StayingSession(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: Any) -> SimpleNamespace:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(session.request, allow_redirects=False))

    return StayingSession


async def _pages(client: Any, asked: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Every page of a LIST, one request for each.

    Raises:
        BrokenAnswer: an answer with status 200 that is no LIST. Botocore reads a page of HTML, or an empty body, as a
            LIST without objects.
    """
    async for page in client.get_paginator("list_objects_v2").paginate(**asked):
        if "IsTruncated" not in page and "Name" not in page:
            raise BrokenAnswer
        yield page


async def _list(client: Any, bucket: str, prefix: str) -> list[SourceFile]:
    asked: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/"}
    async with aclosing(_pages(client, asked)) as pages:
        page = await anext(pages)
    found = _listed(page, prefix)
    if page.get("IsTruncated"):
        # Weights and configuration begin alike, so that one page holds them, however many checkpoints lie beside them.
        asked["Prefix"] += os.path.commonprefix(OWN_FILES)  # noqa: RUF071 - of characters
        found = {file.name: file for file in await _present(client, bucket, prefix, CHAT_FILES)}
        async for narrowed in _pages(client, asked):
            found |= _listed(narrowed, prefix)
    elif {"Prefix": f"{prefix}{os.path.dirname(TOOLS_FILE)}/"} in page.get("CommonPrefixes", []):
        tools = await _head(client, bucket, prefix, TOOLS_FILE)
        found |= {TOOLS_FILE: tools} if isinstance(tools, SourceFile) else {}
    return [found[name] for name in choose_files(found)]


def _listed(page: Mapping[str, Any], prefix: str) -> dict[str, SourceFile]:
    names = ((item["Key"].removeprefix(prefix), item) for item in page.get("Contents", []))
    return {name: SourceFile(name, int(it["Size"]), it.get("ETag", "")) for name, it in names if "/" not in name}


async def _head(client: Any, bucket: str, prefix: str, name: str) -> SourceFile | FailureKind:
    """The file, or whether it is missing or denied: where listing is denied, S3 says 403 for a missing object, too."""
    try:
        answer = await client.head_object(Bucket=bucket, Key=prefix + name)
    except Exception as error:
        kind = diagnose(error).kind
        if kind not in (FailureKind.DENIED, FailureKind.MISSING):
            raise
        return kind
    return SourceFile(name, int(answer["ContentLength"]), answer.get("ETag", ""))


async def _present(client: Any, bucket: str, prefix: str, names: Iterable[str]) -> list[SourceFile]:
    answers = await asyncio.gather(*(_head(client, bucket, prefix, name) for name in names))
    return [answer for answer in answers if isinstance(answer, SourceFile)]


async def _find_without_list(client: Any, bucket: str, prefix: str, denied: Exception) -> list[SourceFile]:
    """The readable files where listing is denied.

    Raises:
        Exception: `denied`, where S3 hides whether configuration or weights are missing, or any error of the client.
    """
    answers = await asyncio.gather(*(_head(client, bucket, prefix, name) for name in OWN_FILES))
    found = [answer for answer in answers if isinstance(answer, SourceFile)]
    if FailureKind.DENIED in answers and len(found) < 2:
        raise denied
    if needs_shards([file.name for file in found]):
        index = await client.get_object(Bucket=bucket, Key=prefix + INDEX_FILE)
        shards = shards_of(await index["Body"].read(MAX_INDEX_BYTES + 1))
        found += await _present(client, bucket, prefix, shards)
    return [*found, *(await _present(client, bucket, prefix, CHAT_FILES) if found else ())]


async def _checksum(client: Any, bucket: str, prefix: str, file: SourceFile) -> Checksum | None:
    """The MD5 in the ETag, or the checksum that S3 keeps of the whole object; None where S3 keeps none or is silent."""
    # ETags of directory buckets (S3 Express), also behind an access point, are no MD5.
    if not bucket.endswith(("--x-s3", "--xa-s3")) and (md5 := Checksum.of_etag(file.etag)) is not None:
        return md5
    asked = {"Bucket": bucket, "Key": f"{prefix}/{file.name}", "ChecksumMode": "ENABLED", **_if_match(file)}
    try:
        answer = await client.head_object(**asked)
    except Exception as error:
        kind = diagnose(error).kind
        if kind.is_retryable or kind is FailureKind.CHANGED:
            raise
        return None  # the reads decide whether the object can be had
    if answer.get("ETag", file.etag).strip('"') != file.etag.strip('"'):
        raise ObjectChanged
    return Checksum.of_answer(answer)


def _if_match(file: SourceFile) -> dict[str, str]:
    # A weak ETag never matches; some stores list their strong ETags without quotes.
    return {"IfMatch": file.etag} if file.etag and not file.etag.startswith("W/") else {}


def _check_endpoint(endpoint: str, *, allow_http: bool) -> None:
    """Raise InvalidSettings without the text of the endpoint, which may hold a password."""
    url = urlsplit(endpoint)
    expected = "https://host[:port]"
    if url.scheme not in ("http", "https") or not url.hostname:
        found, remedy = "an endpoint that is no URL", "correct AWS_ENDPOINT_URL"
    elif url.username or url.password or url.query:
        found, remedy = "credentials", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    elif url.scheme == "http" and not allow_http:
        found, expected = "a plain HTTP endpoint", "https"
        remedy = "use HTTPS, or set AWS_ALLOW_HTTP=true where nobody can listen"
    else:
        return
    raise InvalidSettings(f"{found} in AWS_ENDPOINT_URL", expected=expected, remedy=remedy)


def _flag(env: Mapping[str, str], name: str) -> bool | None:
    value = env.get(name)
    flag = None if value is None else _FLAGS.get(value.strip().lower())
    if value is None or flag is not None:
        return flag
    raise InvalidSettings(f"{name}={value!r}", expected="true or false", remedy=f"correct or unset {name}")
