"""Adapters by URI: the same store, checks and leases as by name, and nothing outside what is allowed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import adapter_id
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, InvalidSettings, SourceUnavailable
from lora_plugins.events import (
    AdapterFetched,
    AdapterResolved,
    AdapterUnknown,
)
from lora_plugins.resolvers.known_versions import ResolvedAdapter
from lora_plugins.resolvers.sources import hub as hub_module
from lora_plugins.resolvers.sources.configured import sources_of
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.settings import Settings
from testbed.hub import Hub
from tests.make import BASE, put
from tests.resolvers import fakes
from tests.resolvers.fakes import GOOD
from tests.resolvers.sources.contract import content, turned
from tests.resolvers.sources.hub_bed import isolate
from tests.resolvers.sources.object_bed import ACCESS_POINT, ACCESS_POINT_ENDPOINT, Bed


class RecordingResolver(fakes.RecordingResolver):
    """A resolver without any source, that remembers its events."""

    def load(self, uri: str, name: str = "sql") -> ResolvedAdapter:
        return asyncio.run(self.resolve(name, BASE.path, uri))

    def newest(self, uri: str | None, name: str = "sql") -> ResolvedAdapter | None:
        return asyncio.run(self.latest(name, uri, BASE.path))


class Place:
    """One scheme's place for adapters: its allowed prefix, and what lies below it."""

    label = "filesystem"

    def __init__(self, root: Path) -> None:
        self.root = root / "allowed"
        self.root.mkdir()
        self.prefix = self.root.as_uri()
        self.settings: dict[str, Any] = {}

    def put(self, name: str, files: Mapping[str, bytes]) -> None:
        put(self.root / name, files)

    def remove(self, name: str) -> None:
        shutil.rmtree(self.root / name)


class S3Place(Place):
    label = "s3"

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.prefix = f"s3://{bed.bucket.name}/loras"
        self.settings = {"aws": bed.s3.env()}

    def put(self, name: str, files: Mapping[str, bytes]) -> None:
        self.bed.put(name, dict(files))

    def remove(self, name: str) -> None:
        for file in GOOD:
            self.bed.bucket.client.delete_object(Bucket=self.bed.bucket.name, Key=f"loras/{name}/{file}")


class AccessPointPlace(S3Place):
    """A bucket that only its access point's ARN names."""

    def __init__(self, bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(bed.at_access_point(monkeypatch))
        self.prefix = f"s3://{ACCESS_POINT}/loras"
        self.settings = {"aws": self.bed.s3.env(ACCESS_POINT_ENDPOINT)}


class HubPlace(Place):
    label = "hub"

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.prefix = "hf://team/loras"
        self.settings = {}
        hub.commit("team/loras", {"README.md": b"adapters"})

    def put(self, name: str, files: Mapping[str, bytes]) -> None:
        self.hub.commit("team/loras", {f"{name}/{file}": data for file, data in files.items()})

    def remove(self, name: str) -> None:
        self.hub.commit("team/loras", {f"{name}/{file}": None for file in GOOD})


@pytest.fixture
def hub(hub_server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub_server.reset()
    isolate(monkeypatch, tmp_path)
    local = partial(hub_module.HubSource, endpoint=hub_server.url, cache_dir=tmp_path / "hub-cache")
    monkeypatch.setattr(hub_module, "HubSource", local)
    return hub_server


@pytest.fixture(params=["file", "s3", "access point", "hf"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "access point":
        return AccessPointPlace(request.getfixturevalue("bed"), monkeypatch)
    if request.param == "s3":
        return S3Place(request.getfixturevalue("bed"))
    if request.param == "hf":
        return HubPlace(request.getfixturevalue("hub"))
    return Place(tmp_path)


@pytest.fixture
def resolver(place: Place, tmp_path: Path) -> RecordingResolver:
    return RecordingResolver(tmp_path / "store", allowed_uris=(place.prefix,), **place.settings)


@pytest.fixture
def allowing(tmp_path: Path) -> Callable[..., RecordingResolver]:
    """A resolver that may fetch below these prefixes; without any, below the directory `allowed`."""

    def make(*prefixes: str, **settings: Any) -> RecordingResolver:
        return RecordingResolver(
            tmp_path / "store", allowed_uris=prefixes or ((tmp_path / "allowed").as_uri(),), **settings
        )

    return make


@pytest.fixture
def v1(tmp_path: Path) -> str:
    """The URI of an adapter in the directory `allowed`."""
    return put(tmp_path / "allowed" / "v1", GOOD).as_uri()


# --- every scheme, with no resolver configured


def test_an_adapter_is_fetched_verified_and_leased_by_its_uri(place, resolver, tmp_path):
    place.put("v1", GOOD)
    resolved = resolver.load(f"{place.prefix}/v1")
    (digest,) = resolver.store.layout.digests()
    assert (resolved.name, resolved.adapter_id, resolved.source) == ("sql", adapter_id("sql"), place.label)
    assert (resolved.path, resolved.digest) == (resolver.store.layout.adapter(digest), digest)
    assert (resolved.rank, resolved.size_bytes) == (4, sum(map(len, GOOD.values())))
    assert resolved.uri == f"{place.prefix}/v1"
    assert content(resolved.path) == GOOD
    assert not resolver.store.remove(digest)
    fetched, event = resolver.emitted
    assert isinstance(fetched, AdapterFetched)
    assert isinstance(event, AdapterResolved)
    assert (fetched.name, fetched.uri, event.name, event.source) == ("sql", resolved.uri, "sql", place.label)
    assert [resolver.ask(name) for name in ("sql", "v1")] == [None, None], "a URI is no name of its adapter"
    with pytest.raises(AdapterNotFound, match="no adapter at this URI") as caught:
        resolver.load(f"{place.prefix}/missing")
    assert (caught.value.adapter, caught.value.http_status) == ("sql", 404)
    assert resolver.kinds[-1] is AdapterUnknown
    with pytest.raises(InvalidAdapter, match="not allowed"):
        RecordingResolver(tmp_path / "store", **place.settings).load(f"{place.prefix}/v1")


def test_a_new_version_leaves_the_old_one_in_place(place, resolver):
    uri = f"{place.prefix}/v1"
    place.put("v1", GOOD)
    place.put("beside", GOOD)
    first = resolver.load(uri)
    assert resolver.newest(uri) == first
    place.put("v1", turned())
    second = resolver.newest(uri)
    assert second.digest != first.digest
    assert content(second.path) == turned()
    assert resolver.load(uri) == second
    place.remove("v1")
    assert resolver.newest(uri) is None
    with pytest.raises(AdapterNotFound):
        resolver.load(uri)
    assert (content(first.path), content(second.path)) == (GOOD, turned()), "what left the source is still served"
    resolver.store.release("sql", first.path)
    assert [resolver.store.remove(version.digest) for version in (first, second)] == [True, False]


def test_what_is_not_allowed_says_nothing_of_what_is_there(allowing, tmp_path):
    resolver, prefix, said = allowing(), (tmp_path / "allowed").as_uri(), []
    for exists in (False, True):
        for directory in ("allowedx/v1", "v1", "allowed-private/v1") if exists else ():
            put(tmp_path / directory, GOOD)
        for leave in ("x/v1", "/../v1", "/%2e%2e/v1", "//v1", "/./v1", "-private/v1"):
            for ask in (resolver.load, resolver.newest):
                with pytest.raises(InvalidAdapter) as caught:
                    ask(f"{prefix}{leave}")
                assert caught.value.adapter == "sql"
                assert str(tmp_path) not in str(caught.value)
                said.append(str(caught.value))
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    assert (resolver.emitted, resolver.store.layout.digests()) == ([], [])


@pytest.mark.parametrize("name", ["", "../sql", "a//b", "a" * 257])
def test_a_malformed_name_is_refused_before_anything_is_asked(allowing, v1, name):
    resolver = allowing()
    with pytest.raises(InvalidAdapter, match="choose another name"):
        resolver.load(v1, name)
    assert resolver.emitted == []


# --- a name by URI and the same name at a source


@pytest.fixture
def both(allowing, v1, tmp_path: Path) -> RecordingResolver:
    """`sql` at a source, and other bytes at file:///…/allowed/v1."""
    put(tmp_path / "names" / "sql", turned())
    resolver = allowing()
    resolver.add(FilesystemSource(tmp_path / "names"))
    return resolver


def test_a_name_by_uri_and_at_a_source_differ(both, v1):
    for _ in range(2):
        by_name, by_uri = both.ask("sql"), both.load(v1)
        assert content(by_name.path) == turned()
        assert content(by_uri.path) == GOOD
        assert by_uri.uri == v1
        assert both.newest(None) == by_name
        assert both.newest(v1) == by_uri


def test_both_at_once_do_not_get_each_others_answer(both, v1):
    async def at_once() -> list[Any]:
        asking = (both.resolve("sql", ""), both.resolve("sql", "", v1), both.latest("sql", None, ""))
        return await asyncio.gather(*asking)

    by_name, by_uri, newest = asyncio.run(at_once())
    assert [content(each.path) for each in (by_name, by_uri, newest)] == [turned(), GOOD, turned()]


def test_a_name_and_a_uri_share_one_fetch(allowing, v1, tmp_path):
    resolver = allowing()
    resolver.add(FilesystemSource(tmp_path / "allowed"))
    assert resolver.ask("v1").path == resolver.load(v1, "other").path
    assert resolver.kinds.count(AdapterFetched) == 1


# --- file://


def test_a_symlink_out_of_the_allowed_directory_is_refused(allowing, v1, tmp_path):
    put(tmp_path / "outside" / "sql", GOOD)
    os.symlink(tmp_path / "outside" / "sql", tmp_path / "allowed" / "sql")
    uri = (tmp_path / "allowed" / "sql").as_uri()
    with pytest.raises(InvalidAdapter, match="symlink"):
        allowing().load(uri)
    assert content(allowing(link_roots=(Path("/"),)).load(uri).path) == GOOD


def test_a_prefix_may_be_the_adapter_itself(allowing, v1, tmp_path):
    put(tmp_path / "allowed" / "v12", GOOD)
    resolver = allowing(v1)
    assert content(resolver.load(v1).path) == GOOD
    with pytest.raises(InvalidAdapter, match="not allowed"):
        resolver.load(v1 + "2")


def test_segments_that_no_name_could_have_are_found(allowing, tmp_path):
    place = put(tmp_path / "allowed" / ".hidden" / "a@b@c d", GOOD)
    assert content(allowing().load(place.as_uri()).path) == GOOD


@pytest.mark.parametrize(
    ("prefix", "says"), [("file:///lost/mount", "LORA_PLUGINS_ALLOWED_URIS"), ("nosuch://bucket", "nosuch://")]
)
def test_a_place_that_cannot_be_asked_is_an_outage(allowing, prefix, says):
    with pytest.raises(SourceUnavailable, match=says):
        allowing(prefix).load(f"{prefix}/x")


# --- object stores


def test_any_fsspec_scheme_works(allowing):
    memory = fsspec.filesystem("memory")
    for file, data in GOOD.items():
        memory.pipe_file(f"/by-uri/team/sql/{file}", data)
    try:
        assert content(allowing("memory://by-uri/team").load("memory://by-uri/team/sql").path) == GOOD
    finally:
        memory.rm("/by-uri", recursive=True)


def test_a_local_path_template_is_for_names_only(bed, allowing, tmp_path):
    bed.put("v1", dict(GOOD))
    uri = f"s3://{bed.bucket.name}/loras/v1"
    allowing(uri, aws=bed.s3.env(), local_path_template=str(tmp_path / "links" / "{lora_name}")).load(uri)
    assert not (tmp_path / "links").exists()


# --- the Hub


def test_a_revision_of_the_uri_is_what_is_served(hub, allowing):
    hub.commit("team/sql", GOOD)
    hub.tag("team/sql", "v1")
    hub.commit("team/sql", turned())
    resolver = allowing("hf://team")
    assert content(resolver.load("hf://team/sql@v1").path) == GOOD
    assert content(resolver.load("hf://team/sql").path) == turned()
    assert content(resolver.newest("hf://team/sql@v1").path) == GOOD


def test_with_a_policy_a_link_leaves_no_folder(allowing, tmp_path):
    root = tmp_path / "allowed"
    put(root / "team-b" / "sql", GOOD)
    put(root / "team-a" / "v3", GOOD)
    (root / "team-a" / "steal").symlink_to("../team-b/sql")
    (root / "team-a" / "latest").symlink_to("v3")
    steal, latest = (f"{root.as_uri()}/team-a/{name}" for name in ("steal", "latest"))
    assert allowing().load(steal)
    resolver = allowing(policy=tmp_path / "policy.toml")
    assert resolver.load(latest)
    with pytest.raises(AdapterNotFound):
        resolver.load(steal)


def test_a_strangers_pull_request_needs_a_prefix_of_its_own(hub, allowing):
    hub.commit("team/sql", GOOD)
    commit = hub.pull_request("team/sql", turned(), 7)
    resolver = allowing("hf://team")
    with pytest.raises(InvalidAdapter, match=r"refs/pr/7.*no branch or tag"):
        resolver.load("hf://team/sql@refs/pr/7")
    with pytest.raises(AdapterNotFound):
        resolver.load(f"hf://team/sql@{commit}")
    pinned = allowing("hf://team", "hf://team/sql@refs/pr/7")
    assert content(pinned.load("hf://team/sql@refs/pr/7").path) == turned()


@pytest.mark.parametrize(("prefix", "followed"), [("hf://team", False), ("hf://team/sql", True)])
def test_a_moved_repository_is_followed_only_where_named(hub, allowing, prefix, followed):
    hub.commit("team/sql", GOOD)
    hub.move("team/sql", "strangers/sql")
    resolver = allowing(prefix)
    if followed:
        assert content(resolver.load("hf://team/sql").path) == GOOD
    else:
        with pytest.raises(AdapterNotFound):
            resolver.load("hf://team/sql")


def by_id(resolver: RecordingResolver, repo: str) -> ResolvedAdapter | None:
    return asyncio.run(resolver.snapshot("any name", repo, BASE.path))


def test_a_hub_id_by_path_is_verified_and_stored(hub, tmp_path):
    hub.commit("team/sql", GOOD)
    resolver = RecordingResolver(tmp_path / "store")
    first = by_id(resolver, "team/sql")
    assert (content(first.path), first.uri) == (GOOD, "hf://team/sql")
    hub.commit("team/sql", turned())
    assert content(resolver.newest("team/sql", "any name").path) == turned()
    hub.commit("team/sql", {CONFIG_FILE: b"{"})
    with pytest.raises(InvalidAdapter, match=CONFIG_FILE):
        by_id(resolver, "team/sql")
    hub.move("team/sql", "others/sql")
    hub.commit("others/sql", GOOD)
    assert content(by_id(resolver, "team/sql").path) == GOOD, "followed, as the operator has named it"
    with pytest.raises(InvalidAdapter, match="not allowed"):
        resolver.load("hf://team/sql")


@pytest.mark.parametrize(
    ("repo", "settings", "error", "says"),
    [
        ("team/none", {}, SourceUnavailable, "missing or private"),
        ("team/text", {}, AdapterNotFound, "any name"),
        ("sql", {}, InvalidAdapter, "absolute path, or org/repo"),
        ("team/sql@v1", {}, InvalidAdapter, "absolute path, or org/repo"),
        ("team/sql", {"use_modelscope": True}, InvalidAdapter, "modelscope download"),
    ],
)
def test_no_hub_id_is_left_to_the_workers(hub, tmp_path, repo, settings, error, says):
    hub.commit("team/sql", GOOD)
    hub.commit("team/text", {"README.md": b"no adapter"})
    with pytest.raises(error, match=says):
        by_id(RecordingResolver(tmp_path / "store", **settings), repo)


def test_the_hub_is_refused_where_repositories_are_modelscopes():
    env = {"VLLM_USE_MODELSCOPE": "True", "VLLM_LORA_RESOLVER_HF_REPO_LIST": "team/sql"}
    with pytest.raises(InvalidSettings, match=r"VLLM_USE_MODELSCOPE=1.*Hugging Face.*modelscope download"):
        sources_of("lora_hf_hub_resolver", Settings.from_env(env))
    assert sources_of("lora_hf_hub_resolver", Settings.from_env({**env, "VLLM_USE_MODELSCOPE": "0"}))
