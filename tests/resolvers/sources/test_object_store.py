"""ObjectSource: templates, names, what is located, other protocols than S3, links, settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from fsspec.config import conf

from lora_plugins.absence import without_login
from lora_plugins.adapter.chat import TEMPLATE_FILE, TOOLS_FILE
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import INDEX_FILE, MAX_INDEX_BYTES, WEIGHTS_FILE
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, InvalidSettings, SourceUnavailable
from lora_plugins.resolvers.sources.object_store import ObjectSource
from lora_plugins.resolvers.sources.s3 import s3_storage_options
from lora_plugins.resolvers.sources.source import VersionChanged, place_in_order
from testbed import faults
from tests.make import CHAT, adapter_files, sharded
from tests.resolvers.sources.contract import content
from tests.resolvers.sources.object_bed import (
    ACCESS_POINT,
    ACCESS_POINT_ENDPOINT,
    BASE,
    FILES,
    LIMITS,
    WEIGHTS,
    Bed,
    locate,
    read,
)
from tests.resolvers.sources.web_bed import WebFiles

ARN = "arn:aws:s3:eu-central-1:123456789012:accesspoint"
IMPOSSIBLE = {
    "": [
        *("s3://bucket/loras", "s3://bucket/{lora_name}/{user}", "s3://bucket/{lora_name!r}"),
        *("s3://bucket/{lora_name:>9}", "s3://bucket/{lora_name.__class__}", "s3://bucket/{0}/{lora_name}"),
        *("s3://bucket/{lora_name", "s3://{lora_name}/adapters", "s3://bucket-{base_model_name}/{lora_name}"),
        *("s3:///{lora_name}", "file:///adapters/{lora_name}", "simplecache::s3://bucket/{lora_name}"),
        *("nonsense://bucket/{lora_name}", f"s3://{ARN}/{{lora_name}}", f"s3://{ARN}/{{lora_name}}/loras"),
        "s3://arn:aws:s3:{base_model_name}:123456789012:accesspoint/team/{lora_name}",
        "s3://arn:aws:iam::123456789012:role/team/{lora_name}",
    ],
    "a login, query or fragment in S3_PATH_TEMPLATE": [
        *("https://user:password@host/{lora_name}", "https://host/{lora_name}?sig=password"),
        *("ftp://me:password@host/{lora_name}", "s3://me:password@bucket/{lora_name}"),
    ],
    "a scheme without '://' in S3_PATH_TEMPLATE": [
        *("s3:/bucket/{lora_name}", "s3:bucket/{lora_name}", "https:/host/{lora_name}"),
    ],
    "no URL of one bucket or host in S3_PATH_TEMPLATE": ["/loras/{lora_name}", "//loras/{lora_name}"],
}


@pytest.mark.parametrize(("template", "says"), [(one, says) for says, them in IMPOSSIBLE.items() for one in them])
def test_impossible_templates_are_refused(template: str, says: str) -> None:
    with pytest.raises(InvalidSettings, match=says) as caught:
        ObjectSource(template)
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "https", "memory"])
def test_a_source_is_named_by_its_scheme(scheme: str) -> None:
    source = ObjectSource(f"{scheme}://bucket/{{lora_name}}")
    assert (source.label, str(source)) == (scheme, f"{scheme} ({scheme}://bucket/{{lora_name}})")
    assert [place_in_order(source, order) for order in (("hub", "s3"), ("s3",), ("hub",))] == [1, 0, 1]
    assert ObjectSource("bucket/{lora_name}").label == "s3"


@pytest.mark.parametrize(
    ("template", "name", "base", "key"),
    [
        ("s3://adapters/l/{lora_name}", "sql", BASE, "l/sql"),
        ("adapters/l/{lora_name}/", "sql", BASE, "l/sql"),
        ("s3://adapters/{base_model_name}/{lora_name}", "team/sql", BASE, "org/base/team/sql"),
        ("s3://adapters/{base_model_name}/{lora_name}", "sql", "/models/base/", "models/base/sql"),
        ("s3://adapters/{base_model_name}/{lora_name}", "sql", "../../base", "base/sql"),
        ("s3://adapters/{lora_name}", "sql@v3", BASE, "sql@v3"),
        ("s3://adapters/{lora_name}/{revision}", "sql@v3", BASE, "sql/v3"),
        ("s3://adapters/{lora_name}/{revision}", "sql", BASE, "sql/main"),
        ("s3://adapters/{lora_name}", "a*[b]?c", BASE, "a*[b]?c"),
        ("s3://adapters/{lora_name}", "%2e%2e::{x}?versionId=1 #+&=~", BASE, "%2e%2e::{x}?versionId=1 #+&=~"),
        ("s3://adapters/{lora_name}", "modèle/数据", BASE, "modèle/数据"),
    ],
)
def test_templates_name_the_key_of_an_adapter(bed: Bed, template: str, name: str, base: str, key: str) -> None:
    bed.bucket.put_many(key, FILES)
    source = bed.source(template)
    located = locate(source, name, base)
    assert located is not None
    assert located.uri == f"s3://adapters/{key}"
    assert read(asyncio.run(bed.obtain(source, located))) == FILES


@pytest.mark.parametrize(
    "template",
    [
        f"s3://{ACCESS_POINT}/loras/{{lora_name}}",
        f"{ACCESS_POINT}/loras/{{lora_name}}/",
        f"s3a://{ACCESS_POINT.replace('/', ':')}/loras/{{lora_name}}",
    ],
)
def test_template_may_name_an_access_point(bed: Bed, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = bed.at_access_point(monkeypatch)
    bed.put("team/sql")
    source = bed.source(template, url=ACCESS_POINT_ENDPOINT)
    located = locate(source, "team/sql")
    assert located is not None
    assert located.uri == f"s3://{ACCESS_POINT}/loras/team/sql"
    assert read(asyncio.run(bed.obtain(source, located))) == FILES


def test_an_absence_says_url_and_endpoint(bed) -> None:
    bed.bucket.put_many("l/org/base/sql", FILES)
    source = bed.source("s3://adapters/l/{base_model_name}/{lora_name}")
    absence = asyncio.run(source.locate(AdapterName.parse("sql"), "org/bse"))
    assert absence.place == f"s3://adapters/l/org/bse/sql/ on {bed.proxy.url}"
    assert absence.detail == "no adapter_config.json and no weights"


def test_passwords_in_urls_are_not_shown() -> None:
    assert without_login("ftp://me:pass@host/x@y:z@/sql") == "ftp://…@host/x@y:z@/sql"
    assert without_login(f"s3://{ACCESS_POINT}/a@b") == f"s3://{ACCESS_POINT}/a@b"
    assert without_login("no repository on https://hf_key@mirror/a/x?token=key&b=1 now") == (
        "no repository on https://…@mirror/a/x?… now"
    )
    assert without_login("abfs://container@account.dfs.core.windows.net/x") == (
        "abfs://container@account.dfs.core.windows.net/x"
    )
    assert "anna" not in str(ObjectSource("memory://anna@host/{lora_name}"))


def test_a_client_that_needs_more_than_the_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings, match=r"ftp://, whose client needs host .* set FSSPEC_FTP_HOST"):
        ObjectSource("ftp://127.0.0.1:1/{lora_name}")
    monkeypatch.setitem(conf, "ftp", {"host": "127.0.0.1"})
    assert ObjectSource("ftp://127.0.0.1:1/{lora_name}")


def test_absence_costs_one_request(bed: Bed) -> None:
    bed.put("sql-longer")
    bed.bucket.put("loras/sql/nested/adapter_config.json", b"{}")
    bed.bucket.put("loras/sql/README.md", b"")
    assert locate(bed.source()) is None
    assert len(bed.proxy.requests()) == 1


def test_files_for_chats_are_found_beside_however_many_checkpoints(bed: Bed) -> None:
    files = {**FILES, **CHAT}
    bed.put(files=files)
    checkpoints = b"<ListBucketResult><Name>b</Name><IsTruncated>true</IsTruncated></ListBucketResult>"
    bed.proxy.plan(faults.status(200, checkpoints), path="prefix=loras/sql/&|prefix=loras%2Fsql%2F&", times=2)
    found = locate(bed.source())
    assert found is not None
    assert {file.name: file.size_bytes for file in found.files} == {name: len(data) for name, data in files.items()}
    methods = [request.method for request in bed.proxy.requests()]
    assert sorted(methods) == ["GET", "GET", *["HEAD"] * len(CHAT)]
    bed.proxy.plan(faults.denied(), method="HEAD", path=TEMPLATE_FILE, times=None)
    found = locate(bed.source())
    assert found is not None
    assert {file.name for file in found.files} == {*files} - {TEMPLATE_FILE}


def test_files_for_chats_cost_no_request_beside_few_files(bed: Bed) -> None:
    """Except a template for tools, which is in a folder of its own."""
    for chat in (CHAT.keys() - {TOOLS_FILE}, CHAT.keys()):
        bed.put(files={**FILES, **{name: CHAT[name] for name in chat}})
        before = len(bed.proxy.requests())
        found = locate(bed.source())
        assert found is not None
        assert {file.name for file in found.files} == {*FILES, *chat}
        assert len(bed.proxy.requests()) - before == (2 if TOOLS_FILE in chat else 1)


def test_listing_denied_but_objects_readable(bed: Bed) -> None:
    bed.put()
    bed.proxy.plan(faults.denied(), path="list-type=2", times=None)
    bed.proxy.plan(faults.denied(), method="HEAD", path=TEMPLATE_FILE, times=None)
    assert read(bed.serve(bed.source())) == FILES
    bed.put(files=CHAT)
    found = locate(bed.source())
    assert found is not None
    assert {file.name for file in found.files} == {*FILES, *CHAT} - {TEMPLATE_FILE}
    bed.put("half", {WEIGHTS_FILE: b"x"})
    with pytest.raises(AdapterNotFound):
        locate(bed.source(), "half")


def test_several_files_are_found_by_index_where_listing_is_denied(bed: Bed) -> None:
    files = sharded(adapter_files())
    bed.put("several", files)
    bed.proxy.plan(faults.denied(), path="list-type=2", times=None)
    assert content(bed.serve(bed.source(), "several").directory) == files


def test_listing_and_objects_denied_is_not_absence(bed: Bed) -> None:
    bed.proxy.plan(faults.denied(), path="list-type=2", times=None)
    bed.proxy.plan(faults.denied(), method="HEAD", times=None)
    with pytest.raises(SourceUnavailable, match="denies"):
        locate(bed.source())


def test_anonymous_requests_are_not_signed(bed: Bed) -> None:
    bed.bucket.put_many("loras/sql", FILES, public=True)
    options = s3_storage_options({**bed.s3.env(bed.proxy.url, anonymous=True), "AWS_SKIP_SIGNATURE": "true"})
    assert read(bed.serve(bed.source(storage_options=options))) == FILES
    assert not any("Authorization" in request.headers for request in bed.proxy.requests())
    assert not any("X-Amz-Signature" in request.query for request in bed.proxy.requests())


# Other protocols.


@pytest.fixture
def web_source(web) -> ObjectSource:
    """A source at the web server, which has an adapter `sql`."""
    template, handler = web
    handler.files = {f"/l/sql/{file}": data for file, data in FILES.items()}
    return ObjectSource(template, limits=LIMITS)


@pytest.mark.parametrize("name", ["sql", "team/a b?c#d%2e&é"])
def test_http_adapters_are_served_by_version(bed: Bed, web, name: str) -> None:
    template, handler = web
    handler.files = {f"/l/{name}/{file}": data for file, data in FILES.items()}
    source = ObjectSource(template, limits=LIMITS)
    assert locate(source, "other") is None
    assert read(bed.serve(source, name)) == FILES
    handler.files[f"/l/{name}/{WEIGHTS_FILE}"] = WEIGHTS[::-1]
    located = locate(source, name)
    assert located is not None
    handler.files[f"/l/{name}/{WEIGHTS_FILE}"] = WEIGHTS
    with pytest.raises(VersionChanged):
        asyncio.run(bed.obtain(source, located))
    bed.assert_clean()


@pytest.mark.parametrize(
    ("status", "found"),
    [(403, "a web server that denies access (HTTP 403)"), (500, "a web server that fails (HTTP 500)")],
)
@pytest.mark.parametrize("is_located", [False, True])
def test_a_web_server_is_named_in_errors(
    bed: Bed, web, web_source: ObjectSource, status: int, found: str, is_located: bool
) -> None:
    located = locate(web_source) if is_located else None
    web[1].status = status
    with pytest.raises(SourceUnavailable) as raised:
        asyncio.run(bed.obtain(web_source, located)) if located else locate(web_source)
    assert found in raised.value.found
    assert "object store" not in str(raised.value)
    assert "bucket" not in str(raised.value)
    assert "list" not in raised.value.remedy


def test_web_adapters_in_several_files_are_served(bed: Bed, web, web_source: ObjectSource) -> None:
    files = sharded(adapter_files())
    web[1].files = {f"/l/sql/{file}": data for file, data in files.items()}
    assert content(bed.serve(web_source).directory) == files


def _send_long_index(handler: WebFiles) -> None:
    """Say how long the index is, and send a gigabyte of it."""
    if not handler.path.endswith(INDEX_FILE):
        WebFiles.do_GET(handler)
        return
    is_get = handler.command == "GET"
    handler.head(200, {"ETag": '"x"', **({} if is_get else {"Content-Length": str(handler.says)})})
    handler.close_connection = True
    with contextlib.suppress(OSError):
        while is_get and type(handler).sent < 1 << 30:
            type(handler).sent += handler.wfile.write(bytes(1 << 20))


@pytest.mark.parametrize("says", [100, 1 << 30])
def test_a_long_web_index_is_not_read_whole(web, says: int) -> None:
    template, handler = web
    handler.files = {f"/l/sql/{CONFIG_FILE}": b"{}"}
    handler.do_GET = handler.do_HEAD = _send_long_index
    handler.says, handler.sent = says, 0
    kind = InvalidAdapter if says > MAX_INDEX_BYTES else SourceUnavailable
    with pytest.raises(kind):
        locate(ObjectSource(template, limits=LIMITS))
    assert handler.sent < 64 << 20


def test_a_web_server_without_versions_is_refused(web, web_source: ObjectSource) -> None:
    web[1].etags = False
    with pytest.raises(SourceUnavailable, match="time of change"):
        locate(web_source)


# Local links.


def point(source: ObjectSource, name: str, directory: Path) -> None:
    located = locate(source, name)
    assert located is not None
    assert located.link is not None
    located.link.point_to(directory, name)


def test_local_link_follows_the_version(bed: Bed, tmp_path: Path) -> None:
    bed.put("team/sql")
    source = bed.source(local_template=f"{tmp_path}/local/{{base_model_name}}/{{lora_name}}")
    link = tmp_path / "local" / "org" / "base" / "team" / "sql"
    for digest in ("a" * 64, "b" * 64, "b" * 64):
        point(source, "team/sql", tmp_path / digest)
        assert os.readlink(link) == str(tmp_path / digest)
    assert [entry.name for entry in link.parent.iterdir()] == ["sql"]


@pytest.mark.parametrize("there", ["file", "directory", "foreign link", "linked parent"])
def test_a_foreign_file_is_left_alone(bed: Bed, tmp_path: Path, logged: pytest.LogCaptureFixture, there: str) -> None:
    bed.put("team/sql")
    outside = tmp_path / "outside"
    outside.mkdir()
    path = tmp_path / "local" / "team" / "sql"
    if there == "linked parent":
        (tmp_path / "local").mkdir()
        (tmp_path / "local" / "team").symlink_to(outside)
    else:
        path.parent.mkdir(parents=True)
        {"file": path.touch, "directory": path.mkdir, "foreign link": lambda: path.symlink_to(outside)}[there]()
    point(bed.source(local_template=f"{tmp_path}/local/{{lora_name}}"), "team/sql", tmp_path / ("a" * 64))
    assert "is not made a link" in logged.text
    assert not list(outside.iterdir())
    assert not path.is_symlink() or there == "foreign link"


@pytest.mark.parametrize("template", ["{lora_name}", "relative/{lora_name}", "/x/{name}", "/x"])
def test_impossible_local_templates_are_refused(template: str) -> None:
    with pytest.raises(InvalidSettings, match="LOCAL_PATH_TEMPLATE"):
        ObjectSource("memory://l/{lora_name}", local_template=template)
