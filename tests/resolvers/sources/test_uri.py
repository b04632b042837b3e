"""Source URIs have one spelling, and none leaves the prefixes that are allowed."""

from __future__ import annotations

import posixpath
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, InvalidSettings
from lora_plugins.resolvers.sources.uri import MAX_CHARACTERS, AllowedUris, SourceUri

ARN = "arn:aws:s3:eu-central-1:123456789012:accesspoint/team"
MULTI_REGION = "arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap"
OUTPOST = "arn:aws-us-gov:s3-outposts:us-west-2:123456789012:outpost/op-01ac5d28a6a232904/accesspoint/team"
PREFIXES = [
    "file:///adapters",
    "s3://bucket/loras",
    "gs://whole-bucket",
    f"s3://{ARN}/loras",
    "https://host.example/loras/",
    "abfss://container@account.dfs.core.windows.net/loras",
    "hf://org",
    "hf://team/repo/safe",
    "hf://team/pinned@v1",
]
ALLOWED = AllowedUris.parse(PREFIXES)


def parsed(text: str) -> SourceUri | None:
    try:
        return SourceUri.parse(text)
    except InvalidAdapter:
        return None


@pytest.mark.parametrize(
    ("text", "scheme", "authority", "segments", "revision"),
    [
        ("file:///a/b", "file", "", ("a", "b"), None),
        ("FILE://localhost/a/b/", "file", "", ("a", "b"), None),
        ("file:///a%20b/100%25", "file", "", ("a b", "100%"), None),
        ("s3://Bucket_1/a b/c=1", "s3", "Bucket_1", ("a b", "c=1"), None),
        ("HTTPS://Host.Example:443/A", "https", "host.example", ("A",), None),
        ("http://host:8080/a", "http", "host:8080", ("a",), None),
        ("abfs://c@Account.dfs.core.windows.net/x", "abfs", "c@account.dfs.core.windows.net", ("x",), None),
        (f"s3://{ARN}/a/b", "s3", ARN, ("a", "b"), None),
        ("s3://arn:aws:s3:eu-central-1:123456789012:accesspoint:team/a/b/", "s3", ARN, ("a", "b"), None),
        (f"s3a://{ARN}", "s3a", ARN, (), None),
        (f"s3://{MULTI_REGION}/a", "s3", MULTI_REGION, ("a",), None),
        (f"s3://{MULTI_REGION.replace('accesspoint/', 'accesspoint:')}/a", "s3", MULTI_REGION, ("a",), None),
        (f"s3://{OUTPOST}/a", "s3", OUTPOST, ("a",), None),
        (f"s3://{OUTPOST.replace('/', ':')}/a", "s3", OUTPOST, ("a",), None),
        ("s3://team-metabgjwhkwg3cgn-s3alias/a", "s3", "team-metabgjwhkwg3cgn-s3alias", ("a",), None),
        ("memory://bucket/x", "memory", "bucket", ("x",), None),
        ("hf://org/repo", "hf", "org", ("repo",), None),
        ("hf://org/repo@v1/a/b", "hf", "org", ("repo", "a", "b"), "v1"),
        ("hf://org/repo@feature%2Fx/a", "hf", "org", ("repo", "a"), "feature/x"),
        ("hf://org/repo@refs/pr/1/a", "hf", "org", ("repo", "a"), "refs/pr/1"),
        ("hf://org/repo@refs%2fpr%2F1/a", "hf", "org", ("repo", "a"), "refs/pr/1"),
    ],
)
def test_well_formed_uris_are_parsed(text, scheme, authority, segments, revision):
    uri = SourceUri.parse(text)
    assert (uri.scheme, uri.authority, uri.segments, uri.revision) == (scheme, authority, segments, revision)


@pytest.mark.parametrize(
    "text",
    [
        *("", "sql", "/etc/passwd", "file:/etc/passwd", "s3:bucket/x", "://x/y"),
        # ARNs of something else than an access point, or not whole
        "s3://arn:aws:s3:eu-central-1:123456789012:accesspoint",
        "s3://arn:aws:s3:eu-central-1:123456789012:accesspoint/",
        "s3://arn:aws:s3:eu-central-1:123456789012:accesspoint/../x",
        "s3://arn:aws:s3:eu-central-1:12345:accesspoint/team/x",
        "s3://arn:aws:s3::123456789012:accesspoint/team/x",
        "s3://arn:aws:s3:eu-central-1:123456789012:accesspoint/alias.mrap/x",
        "s3://arn:aws:s3:eu-central-1:123456789012:outpost/op-1/accesspoint/team/x",
        "s3://arn:aws:s3-outposts:eu-central-1:123456789012:accesspoint/team/x",
        "s3://arn:aws:s3-object-lambda:eu-central-1:123456789012:accesspoint/team/x",
        "s3://arn:aws:iam::123456789012:role/team/x",
        *(f"s3://{ARN}/x::y", f"s3://{ARN}//x", f"s3://{ARN}/../x", f"gs://{ARN}/x"),
        # buckets and hosts that nobody can have
        *("s3://", "s3:///x", "s3://./x", "s3://../x", "s3://a..b/x", "file://host/x", "file://../x"),
        *("https://host:/a", "https://host:99999999/a", "https://[::1]/a"),
        # empty segments, and those that climb
        *("s3://bucket//x", "s3://bucket/a//b", "s3://bucket/a//", "s3://bucket//", "s3://bucket/./x"),
        *("s3://bucket/loras/../x", "s3://bucket/loras/..", "s3://bucket/a\\..\\b", "s3://bucket/a%2f..%2fb"),
        *("file:///adapters/%2e%2e/x", "file:///adapters/%2E./x", "https://host/a%252e%252e/x"),
        # escapes that are none, or of what needs none
        *("s3://bucket/100%", "file:///a%2Fb", "file:///a%5Cb", "file:///a%00b", "file:///a%0ab"),
        *("file:///%61dapters", "file:///a%ff", "file:///a%", "file:///a%zz"),
        # queries, fragments and logins
        *("https://host/a?versionId=1", "https://host/a?X-Amz-Signature=secret", "https://host/a#b"),
        *("https://user:password@host/a", "https://user@host/a", "s3://key:secret@bucket/a"),
        *("abfss://c:secret@account/x", "abfss://a@b@c/x"),
        # chains of fsspec
        *("simplecache::s3://bucket/a", "zip://x::s3://bucket/a", "zip://x.zip::s3://bucket"),
        # characters that are not seen, or not as they are
        *("s3://bucket/a\0", "s3://bucket/a\n", "s3://bucket/\u202eb", "s3://bucket/\u200b"),
        *("s3://bucket/e\u0301", "s3://bucket/ a", "s3://bucket/a ", "s3://bucket/" + "a" * MAX_CHARACTERS),
        # the Hub's
        *("hf://org@v1/repo", "hf://o--g/repo", "hf://org/re--po", "hf://org/repo@", "hf://org/repo@a@b"),
        *("hf://org/repo@../x", "hf://org/repo@..", "hf://org/repo@a%2F..%2Fb", "hf://org/repo@a%2F"),
        *("hf://org/repo%40v1", "hf://org/repo/a%40b", "hf://org/repo/../x", "hf://org:80/repo"),
        *("hf://datasets/org/repo", "hf://spaces/org/repo"),
    ],
)
def test_malformed_uris_are_refused(text):
    assert_refused(text)


def test_an_empty_revision_is_named():
    assert "nothing after '@'" in assert_refused("hf://org/repo@").found


def assert_refused(text):
    with pytest.raises(InvalidAdapter) as caught:
        ALLOWED.check(text)
    error = caught.value
    assert (error.code, bool(error.found), bool(error.expected), bool(error.remedy)) == ("L005", True, True, True)
    assert "secret" not in str(error)
    assert "password@" not in str(error)
    assert parsed(text) is None
    return error


@pytest.mark.parametrize(
    "text",
    [
        *("file:///adapters", "file:///adapters/sql", "File:///adapters/sql/", "s3://bucket/loras/a/b"),
        *(f"s3://{ARN}/loras/x", f"s3://{ARN.replace('/', ':')}/loras/x", "gs://whole-bucket/x"),
        *("https://HOST.example:443/loras/x", "abfss://container@account.dfs.core.windows.net/loras/x"),
        *("hf://org/any/sub", "hf://org/any@v9", "hf://team/repo@dev/safe/x", "hf://team/pinned@v1/x"),
    ],
)
def test_uris_below_a_prefix_are_allowed(text):
    assert ALLOWED.check(text) == SourceUri.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("file:///", "file:///adapters2", "file:///adapter", "file:///Adapters/sql", "file:///etc/adapters"),
        *("s3://adapters/sql", "s3://bucket", "s3://bucket/lora", "s3://bucket/loras-private/x"),
        *("s3://BUCKET/loras/x", "s3://bucket2/loras/x", "s3a://bucket/loras/x", "gs://whole-bucket"),
        *(f"s3://{ARN}/loras2/x", f"s3://{ARN}2/loras/x"),
        *("s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/team/loras/x", f"s3://{MULTI_REGION}/loras/x"),
        *("gs://whole-bucket2/x", "http://host.example/loras/x", "https://host.example:8443/loras/x"),
        *("https://host.example.evil/loras/x", "https://host.example/LORAS/x"),
        "abfss://other@account.dfs.core.windows.net/loras/x",
        *("abfs://container@account.dfs.core.windows.net/loras/x", "hf://org", "hf://org2/any", "hf://Org/any"),
        *("hf://team/repo", "hf://team/repo/safer", "hf://team/repo2/safe", "hf://team/pinned"),
        *("hf://team/pinned@v2", "hf://team/pinned@v10/x"),
    ],
)
def test_uris_beside_a_prefix_are_refused(text):
    SourceUri.parse(text)
    with pytest.raises(InvalidAdapter, match=r"not allowed|without a path"):
        ALLOWED.check(text)


def test_without_prefixes_nothing_is_allowed():
    with pytest.raises(InvalidAdapter, match="not allowed"):
        AllowedUris.parse(()).check("file:///a")


@pytest.mark.parametrize("prefix", ["bucket/x", "s3://bucket/../x", "s3://key:secret@bucket", "*", "s3://bucket/a*//"])
def test_startup_fails_with_a_malformed_prefix(prefix):
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_ALLOWED_URIS") as caught:
        AllowedUris.parse(["file:///a", prefix])
    assert "secret" not in str(caught.value)


# What attacks are made of, behind what is allowed.
PIECES = st.sampled_from(
    [
        *("..", ".", "/", "//", "\\", "%2e", "%2E%2e", "%2f", "%5c", "%252e", "%", "@", ":", "::", "?", "#", "*"),
        *("a", "loras", "é", "e\u0301", " ", "\0", "\u202e", "~", "refs", "v1", "repo", "safe", "hf:", "s3:"),
    ]
)
ATTACKS = st.builds(lambda base, rest: base + "".join(rest), st.sampled_from(PREFIXES), st.lists(PIECES, max_size=8))
ANY = st.one_of(ATTACKS, st.text(max_size=60), st.builds("s3://bucket/{}".format, st.text(max_size=30)))


@given(ANY)
@example("file:///adapters/a%25252e")
def test_a_uri_has_one_spelling_that_parses_as_itself(text):
    uri = parsed(text)
    if uri is not None:
        assert SourceUri.parse(str(uri)) == uri
        assert str(SourceUri.parse(str(uri))) == str(uri)


@given(ANY)
def test_every_allowed_uri_resolves_below_a_prefix(text):
    try:
        uri = ALLOWED.check(text)
    except InvalidAdapter:
        return
    if uri.scheme == "hf":
        assert uri.authority in ("org", "team")
        return
    # As a server or a file system would: decode, then resolve dots and double slashes.
    split = urlsplit(str(uri).replace(f"//{ARN}/", "//bucket/"))  # one name, though it has a slash
    resolved = posixpath.normpath(unquote(split.path) if uri.scheme in ("file", "https") else split.path)
    assert resolved == posixpath.normpath("/" + uri.path)
    below = {"file": "/adapters", "s3": "/loras", "gs": "/", "https": "/loras", "abfss": "/loras"}[uri.scheme]
    assert PurePosixPath(resolved).is_relative_to(below)
    assert split.netloc in {urlsplit(prefix).netloc for prefix in PREFIXES}
    assert split.username is None or uri.scheme == "abfss"
    assert split.password is None


@given(st.text(st.sampled_from("ab.-/@ %2e:é?#&=+~'"), min_size=1, max_size=30))
@example("100%")
@example("a::b")
@example("%2e%2e")
def test_every_folder_of_a_name_survives_in_a_hub_uri(path):
    try:
        name = AdapterName.parse(path)
    except AdapterNotFound:
        return
    uri = SourceUri("hf", "org", ("repo", *name.segments), name.revision)
    again = SourceUri.parse(str(uri))
    assert again == uri
    assert (again.repo, again.subfolder, again.revision) == ("org/repo", name.path, name.revision)
