"""The Hub source against a local Hub, through the real `huggingface_hub` and into the real store."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources import hub_files
from lora_plugins.resolvers.sources.hub import HubSource
from lora_plugins.resolvers.sources.hub_files import RepoFile, copy_cached
from lora_plugins.resolvers.sources.hub_repos import HubPatterns
from lora_plugins.resolvers.sources.source import RemoteAdapter, SourceFile, VersionChanged
from lora_plugins.resolvers.sources.uri import SourceUri
from testbed import faults
from testbed.hub import Hub
from testbed.proxy import FaultProxy
from tests.make import CHAT, adapter_files, content, pair, sharded
from tests.resolvers.sources.hub_bed import FILES, OTHER, Bed, check, isolate
from tests.virtual_time import run_until_late

LONG_S = 600.0
SHA256 = hashlib.sha256(FILES[WEIGHTS_FILE]).hexdigest()


@pytest.fixture
def server(hub_server: Hub) -> Hub:
    return hub_server


@pytest.fixture
def bed(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bed:
    server.reset()
    server.commit("team/sql", {**FILES, "README.md": b"hello", "optimizer.pt": b"x" * 1000})
    isolate(monkeypatch, tmp_path)
    return Bed(server, tmp_path)


@pytest.fixture
def proxy(hub_proxy: FaultProxy, bed: Bed) -> Iterator[FaultProxy]:
    hub_proxy.clear()
    hub_proxy.forget()
    yield hub_proxy
    hub_proxy.refuse(False)


def located(bed: Bed, name: str, **more) -> RemoteAdapter:
    found = bed.locate(name, **more)
    assert found is not None
    return found


# Locating


def test_locating_costs_one_request(bed):
    head = bed.hub.commit("team/sql", {"README.md": b"more"})
    found = located(bed, "team/sql")
    assert (found.source, found.uri, found.version) == ("hub", "hf://team/sql", head)
    assert [(f.name, f.size_bytes, f.sha256) for f in found.files] == [
        (CONFIG_FILE, len(FILES[CONFIG_FILE]), ""),
        (WEIGHTS_FILE, len(FILES[WEIGHTS_FILE]), SHA256),
    ]
    data = FILES[CONFIG_FILE]
    assert found.files[0].etag == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    assert [r.path for r in bed.hub.requests()] == ["/api/models/team/sql/revision/main"]


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("sql", "a name on the Hub has an owner and a repository: org/repo"),
        ("team/SQL", "does not name it (team/sql, team/secret, acme/*)"),
        ("zebra/x", "does not name it (team/sql, team/secret, acme/*)"),
        ("acme/a--b", "no repository of the Hub can be called 'acme/a--b'"),
    ],
)
def test_a_name_outside_the_list_says_so(bed, name, detail):
    absence = bed.ask(name)
    assert (absence.was_asked, absence.place) == (False, "")
    assert absence.detail.endswith(detail)
    assert bed.hub.count() == 0


def test_what_the_hub_lacks_is_said_with_its_place(bed, server):
    token = server.user("hf_any")
    server.commit("acme/many", {f"fr/{n}": d for n, d in FILES.items()})
    asked = {name: bed.ask(name, token=token) for name in ("acme/missing", "team/sql@v9", "acme/many", "acme/many/es")}
    on = f" on {server.url}"
    assert {name: (one.place.removesuffix(on), one.detail.partition(",")[0]) for name, one in asked.items()} == {
        "acme/missing": ("hf://acme/missing@main", "no such repository"),
        "team/sql@v9": ("hf://team/sql@v9", "no such revision"),
        "acme/many": ("hf://acme/many@main", "a repository without adapter files at its root"),
        "acme/many/es": ("hf://acme/many@main/es", "a repository without adapter files in this folder"),
    }
    hidden = bed.ask("acme/missing")
    assert hidden.was_asked
    assert "missing or private" in hidden.detail


def test_a_pin_serves_no_other_revision(bed):
    bed.hub.tag("team/sql", "v1")
    absence = bed.ask("team/sql@main", entries="team/sql@v1")
    assert (absence.was_asked, "pins it to another revision" in absence.detail) == (False, True)
    assert bed.hub.count() == 0
    pinned, named = (located(bed, name, entries="team/sql@v1") for name in ("team/sql", "team/sql@v1"))
    assert pinned.version == named.version
    assert [r.path for r in bed.hub.requests()] == ["/api/models/team/sql/revision/v1"] * 2


def test_tags_branches_and_their_commits_are_revisions(bed, server):
    first = located(bed, "team/sql").version
    server.tag("team/sql", "v1")
    branch = server.commit("team/sql", OTHER, branch="feature/x")
    asked = ("v1", first, "feature/x", "refs/heads/feature/x", "refs/tags/v1", branch)
    revisions = {revision: located(bed, f"team/sql@{revision}").version for revision in asked}
    assert list(revisions.values()) == [first, first, branch, branch, first, branch]


@pytest.mark.parametrize("name", ["team/sql", "acme/sql"])
@pytest.mark.parametrize("revision", ["refs/pr/7", "refs/convert/parquet", "pr/7", "COMMIT"])
def test_a_strangers_pull_request_is_no_adapter(bed, server, name, revision):
    server.commit("acme/sql", FILES)
    commit = server.pull_request(name, OTHER, 7)
    absence = bed.ask(f"{name}@{revision.replace('COMMIT', commit)}")
    assert "no branch or tag" in absence.detail
    assert absence.was_asked == (not revision.startswith("refs/"))


def test_a_pull_request_is_served_where_it_is_pinned(bed, server):
    commit = server.pull_request("team/sql", OTHER, 7)
    assert bed.serve("team/sql", entries="team/sql@refs/pr/7") == OTHER
    assert bed.serve("team/sql@refs/pr/7", entries="team/sql, team/sql@refs/pr/7") == OTHER
    assert bed.serve(f"team/sql@{commit}", entries=f"team/*, team/sql@{commit}") == OTHER
    server.forget()
    located(bed, "team/sql", entries="team/sql@refs/pr/7")
    assert server.count() == 1


def test_a_commit_deep_in_a_history_is_published(bed, server, monkeypatch):
    monkeypatch.setattr(server, "page_size", 2)
    first = located(bed, "team/sql").version
    for text in range(5):
        server.commit("team/sql", {"README.md": str(text).encode()})
    assert located(bed, f"team/sql@{first}").version == first


def test_a_commit_that_was_published_is_asked_once(bed, server):
    first = located(bed, "team/sql").version
    server.commit("team/sql", OTHER)
    server.tag("team/sql", "v1", first)
    source = bed.source()
    server.forget()

    async def ask(times: int) -> None:
        for _ in range(times):
            assert isinstance(await source.locate(AdapterName.parse(f"team/sql@{first}"), ""), RemoteAdapter)

    asyncio.run(ask(3))
    assert [server.count("GET", path) for path in ("/revision/", "/refs", "/commits/")] == [3, 1, 0]


def test_a_hub_that_does_not_list_branches_is_unavailable(bed, proxy):
    first = located(bed, "team/sql").version
    proxy.plan(faults.status(403), method="GET", path="/refs")
    with pytest.raises(SourceUnavailable):
        bed.locate(f"team/sql@{first}", endpoint=proxy.url)


@pytest.mark.parametrize(
    "endpoint", ["http://hf_secret@127.0.0.1:9", "http://me:hf_secret@127.0.0.1:9/m?key=hf_secret"]
)
def test_keys_in_a_mirrors_url_are_never_said(bed, endpoint, caplog):
    caplog.set_level("INFO", logger="lora_plugins")
    with pytest.raises(SourceUnavailable) as caught:
        bed.ask("team/sql", endpoint=endpoint, timeout_s=2)
    said = [
        str(caught.value),
        *map(str, caught.value.fields().values()),
        caplog.text,
        str(bed.source(endpoint=endpoint)),
    ]
    assert "hf_secret" not in " ".join(said)
    assert "127.0.0.1:9" in caught.value.place


# Private, gated, renamed


def test_a_private_repository_needs_its_token(bed, server):
    server.commit("team/secret", FILES)
    server.commit("acme/secret", FILES)
    server.private("team/secret", ["hf_reader"])
    server.private("acme/secret", ["hf_reader"])
    # An entry names it, so its operator must hear of it; under a wildcard anybody may ask for any name.
    with pytest.raises(SourceUnavailable, match=r"missing or private, team/secret@main.*set HF_TOKEN"):
        bed.locate("team/secret")
    assert bed.locate("acme/secret") is None
    assert bed.locate("acme/missing") is None
    assert bed.serve("team/secret", token="hf_reader") == FILES
    assert bed.serve("acme/secret", token="hf_reader") == FILES


def test_the_token_comes_from_the_hubs_own_chain(bed, server, monkeypatch):
    server.commit("team/secret", FILES)
    server.private("team/secret", ["hf_reader"])
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert bed.serve("team/secret") == FILES
    with pytest.raises(SourceUnavailable):
        bed.locate("team/secret", token=False)


@pytest.mark.parametrize("name", ["team/sql", "acme/x"])
def test_a_refused_token_is_an_error_for_every_name(bed, name):
    with pytest.raises(SourceUnavailable, match=r"denies.*HTTP 401.*expired") as caught:
        bed.locate(name, token="hf_expired")
    assert "hf_expired" not in str(caught.value)


@pytest.mark.parametrize(("token", "advice"), [(False, "set HF_TOKEN"), ("hf_stranger", "the account of the token")])
def test_a_gated_repository_says_what_to_do(bed, server, token, advice):
    server.gated("team/sql", ["hf_granted"])
    server.user("hf_stranger")
    with pytest.raises(SourceUnavailable, match=r"gated repository, team/sql@.*accept its terms") as caught:
        bed.serve("team/sql", token=token)
    assert advice in str(caught.value)
    assert bed.leftovers() == []
    assert bed.serve("team/sql", token="hf_granted") == FILES


def test_a_renamed_repository_is_followed_only_where_it_was_named(bed, server):
    server.commit("acme/old", FILES)
    server.move("acme/old", "elsewhere/new")
    server.move("team/sql", "team/sql-2")
    assert bed.locate("acme/old") is None
    assert bed.serve("team/sql") == FILES


# Fetching


def test_only_the_located_files_are_downloaded(bed, server):
    found = located(bed, "team/sql")
    server.forget()
    stored = bed.obtain(bed.source(), found)
    assert content(stored.directory) == FILES
    assert sorted(r.path for r in server.requests("GET")) == [
        f"/team/sql/resolve/{found.version}/{name}" for name in sorted(FILES)
    ]
    assert server.count("GET", "api/") == 0
    assert bed.leftovers() == []
    assert not bed.cache.exists()
    server.forget()
    assert not bed.obtain(bed.source(), found).fetched
    assert server.count() == 0


def test_a_download_leaves_no_thread_behind(bed):
    before = {*threading.enumerate()}
    assert bed.serve("team/sql") is not None
    assert bed.leftovers() == []  # which waits for the threads of downloads
    new = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in new if not name.startswith(("asyncio_", "lora-plugins-"))] == []  # those are pools


@pytest.mark.parametrize("token", [None, "hf_any"])
def test_a_repository_gone_since_it_was_located_is_absent(bed, server, token):
    """Without a token the Hub answers 401 for a repository that is missing, as for one that is private."""
    server.user("hf_any")
    server.commit("acme/sql", FILES)
    found = located(bed, "acme/sql", token=token)
    server.delete("acme/sql")
    with pytest.raises(VersionChanged):
        bed.obtain(bed.source(token=token), found)
    assert bed.locate("acme/sql", token=token) is None
    assert bed.leftovers() == []


def test_large_files_come_from_another_host_without_the_token(bed, server, monkeypatch):
    server.private("team/sql", ["hf_reader"])
    monkeypatch.setattr(server, "redirects", True)
    assert bed.serve("team/sql", token="hf_reader") == FILES
    # httpx follows to another origin without the token; asked with it, the store of the files would have seen it.
    assert [r.authorized for r in server.requests("GET", "^/-/")] == [False]


def test_files_are_fetched_at_the_same_time(bed, server, proxy):
    all_of_them = threading.Barrier(len(FILES), timeout=60)
    for name in FILES:
        proxy.plan(faults.run_before(all_of_them.wait), method="GET", path=name)
    found = located(bed, "team/sql")
    bed.obtain(bed.source(endpoint=proxy.url), found)
    assert not all_of_them.broken


# What the Hub's own cache has


def cache(bed: Bed, repo: str, *names: str, folder: str = "", **more: str) -> list[Path]:
    """Have huggingface_hub download files into the Hub's cache; where they are."""
    return [
        Path(hf_hub_download(repo, folder + name, cache_dir=bed.cache, endpoint=bed.hub.url, **more)) for name in names
    ]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_the_hubs_cache_has_whole_is_copied(bed, server, monkeypatch, is_damaged):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(bed.cache))
    found = located(bed, "team/sql")
    for link in cache(bed, "team/sql", *FILES, revision=found.version):
        if is_damaged:
            cached = link.resolve()
            data = cached.read_bytes()
            cached.chmod(0o600)
            cached.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    server.forget()
    assert content(bed.obtain(bed.source(cache_dir=None), found).directory) == FILES
    assert (server.count() > 0) is is_damaged


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("needed", "for_chats"),
    [(FILES, {}), (FILES, CHAT), (sharded(adapter_files()), {})],
    ids=["one file", "for chats", "several"],
)
def test_offline_serves_what_the_cache_holds_as_the_same_version(bed, server, monkeypatch, needed, for_chats):
    files = {**needed, **for_chats}
    server.commit("acme/many", {f"fr/{n}": d for n, d in files.items()})
    online = located(bed, "acme/many/fr")
    *first, last = needed
    cache(bed, "acme/many", *first, *for_chats, folder="fr/")
    with monkeypatch.context() as patched:
        offline(patched)
        with pytest.raises(SourceUnavailable, match="offline mode"):
            bed.locate("acme/many/fr")
    cache(bed, "acme/many", last, folder="fr/")
    server.forget()
    offline(monkeypatch)
    assert located(bed, "acme/many/fr") == online
    assert located(bed, f"acme/many/fr@{online.version}").version == online.version
    assert bed.serve("acme/many/fr") == files
    assert server.count() == 0


@pytest.mark.parametrize(
    ("repos", "folder", "listed"),
    [
        ("acme/many", "", ("acme/many/fr",)),
        ("acme/*", "", ("acme/many/fr",)),
        ("team/*", "", ()),
        ("acme/*", "no cache", ()),
    ],
)
def test_offline_adapters_of_the_cache_are_listed(bed, server, monkeypatch, repos, folder, listed):
    names = ("fr/adapter_config.json", "fr/adapter_model.safetensors", "de/adapter_config.json")
    server.commit("acme/many", {name: FILES[name.partition("/")[2]] for name in names})
    cache(bed, "acme/many", *names)
    offline(monkeypatch)
    source = HubSource(HubPatterns.parse(repos), timeout_s=9, endpoint=server.url, cache_dir=bed.cache / folder)
    assert asyncio.run(source.names("/base")).names == listed, "what is not whole is not served either"


def test_offline_files_for_chats_may_be_missing(bed, server, monkeypatch):
    server.commit("team/sql", CHAT)
    cache(bed, "team/sql", *FILES)
    offline(monkeypatch)
    assert bed.serve("team/sql") == FILES


@pytest.mark.parametrize("cached", [[], [WEIGHTS_FILE]])
def test_offline_never_answers_absent(bed, monkeypatch, cached):
    cache(bed, "team/sql", *cached)
    offline(monkeypatch)
    with pytest.raises(SourceUnavailable, match="offline mode"):
        bed.locate("team/sql")


def test_a_fetch_that_goes_offline_says_so(bed, monkeypatch):
    found = located(bed, "team/sql")
    offline(monkeypatch)
    with pytest.raises(SourceUnavailable, match="offline mode"):
        bed.obtain(bed.source(), found)
    assert bed.leftovers() == []


# Faults


@pytest.mark.parametrize("fault", [faults.status(503), faults.too_many(0), faults.reset(), faults.short()])
def test_a_passing_fault_is_retried(bed, proxy, fault):
    for path in ("/api/models", f"resolve.*{CONFIG_FILE}", f"resolve.*{WEIGHTS_FILE}"):
        proxy.plan(fault, method="GET", path=path)
    assert bed.serve("team/sql", endpoint=proxy.url) == FILES
    assert proxy.count("GET", "/api/models") == 2


def commit_large(server: Hub, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """`acme/large`: weights of 256 kB, which are several of huggingface_hub's pieces, of 100 kB here."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    large = adapter_files(pair("model.layers.0.self_attn.q_proj", 16, 2_000, 2_000), r=16)
    server.commit("acme/large", large)
    return large


def test_a_body_that_breaks_off_is_resumed(bed, server, proxy, monkeypatch):
    # huggingface_hub keeps whole pieces of its own size, so only a file of several is resumed.
    large = commit_large(server, monkeypatch)
    piece = constants.DOWNLOAD_CHUNK_SIZE
    proxy.plan(faults.short(after=piece + 300), method="GET", path=WEIGHTS_FILE)
    assert bed.serve("acme/large", endpoint=proxy.url) == large
    assert [r.range for r in proxy.requests("GET", WEIGHTS_FILE)] == [None, f"bytes={piece}-"]


@pytest.mark.parametrize(
    "fault",
    [
        faults.status(500),
        faults.status(403),
        faults.status(404, b"<html>a load balancer</html>"),
        faults.status(200, b"<html>a captive portal</html>"),
        faults.status(200, b"[]"),
        faults.status(200, b'{"id": "acme/any", "sha": "abc"}'),
        faults.status(200, b'{"id": "acme/any", "sha": "abc", "siblings": [{"rfilename": "adapter_config.json"}]}'),
        faults.status(200, b'{"id": "acme/any", "siblings": []}'),
        faults.reset(),
    ],
)
def test_an_outage_is_never_absence(bed, proxy, fault):
    proxy.plan(fault, times=None)
    for name in ("team/sql", "acme/any"):
        with pytest.raises(SourceUnavailable) as caught:
            bed.locate(name, endpoint=proxy.url)
        assert (caught.value.code, caught.value.http_status) == ("L006", 503)


def cut_off(proxy):
    """End what stalls in the proxy, and with it the threads that read it."""
    proxy.clear()
    proxy.refuse()
    proxy.refuse(False)


@pytest.mark.parametrize(("timeout_s", "look_up_s"), [(300.0, 30), (LONG_S, 60)])
def test_silence_ends_at_the_deadline(bed, proxy, timeout_s, look_up_s):
    proxy.plan(faults.stall(LONG_S), times=None)
    locating = bed.source(endpoint=proxy.url, timeout_s=timeout_s).locate(AdapterName.parse("team/sql"), "")
    with pytest.raises(SourceUnavailable, match=f"within {look_up_s} s"):
        run_until_late(locating, proxy.count, LONG_S)
    cut_off(proxy)


def test_a_fetch_ends_at_its_deadline(bed, proxy):
    found = located(bed, "team/sql")
    proxy.plan(faults.stall(LONG_S, after=100), method="GET", path=WEIGHTS_FILE, times=None)
    source = bed.source(endpoint=proxy.url, timeout_s=LONG_S)
    obtaining = bed.store.obtain(found, lambda arriving: source.fetch(found, arriving), check)
    with pytest.raises(SourceUnavailable, match="within 600 s"):
        run_until_late(obtaining, lambda: proxy.bytes_sent(WEIGHTS_FILE) >= 100, LONG_S)
    cut_off(proxy)
    assert bed.leftovers() == []


def test_a_slow_fetch_that_goes_on_outlasts_the_deadline(bed, proxy, monkeypatch):
    size_bytes = len(FILES[WEIGHTS_FILE])
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", size_bytes // 20)  # 10 MB
    found = located(bed, "team/sql")
    proxy.plan(faults.throttle(size_bytes / 4), method="GET", path=WEIGHTS_FILE, times=None)  # four seconds for all
    began = time.monotonic()
    stored = bed.obtain(bed.source(endpoint=proxy.url, timeout_s=1.5), found)
    assert content(stored.directory) == FILES
    assert time.monotonic() - began > 2 * 1.5


def test_a_copy_from_the_hubs_cache_reports_its_progress(tmp_path, monkeypatch):
    (tmp_path / "cached").write_bytes(data := os.urandom(3 << 20))
    monkeypatch.setattr(hub_files, "cached_path", lambda *_: tmp_path / "cached")

    def no_reflink(*_: object) -> int:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", no_reflink)
    (tmp_path / "to").mkdir()
    file, pieces = RepoFile("team/sql", "0" * 40, "weights", SourceFile("weights", len(data))), []
    assert copy_cached(file, tmp_path / "to", None, lambda: pieces.append(1))
    assert (len(pieces), (tmp_path / "to" / "weights").read_bytes()) == (3, data)


def test_flipped_bytes_are_never_published(bed, proxy):
    proxy.plan(faults.flip(1000), method="GET", path=WEIGHTS_FILE, times=None)
    with pytest.raises(SourceUnavailable, match="SHA-256"):
        bed.serve("team/sql", endpoint=proxy.url)
    proxy.clear()
    assert bed.leftovers() == []
    proxy.plan(faults.flip(5), method="GET", path=CONFIG_FILE)
    assert bed.serve("team/sql", endpoint=proxy.url) == FILES
    assert proxy.count("GET", CONFIG_FILE) >= 2, "a small file is fetched again"


def test_another_digest_in_headers_changes_nothing(bed, proxy):
    other = f'"{"0" * 64}"'
    proxy.plan(faults.relabelled({"ETag": other, "X-Linked-ETag": other}), path=WEIGHTS_FILE, times=None)
    assert bed.serve("team/sql", endpoint=proxy.url) == FILES
    assert {request.fault for request in proxy.requests(path=WEIGHTS_FILE)} == {"relabelled"}
    assert bed.leftovers() == []


def test_a_fetch_that_is_cancelled_ends_and_leaves_nothing(bed, server, proxy, monkeypatch):
    large = commit_large(server, monkeypatch)
    proxy.plan(faults.throttle(30_000), method="GET", path=WEIGHTS_FILE, times=None)
    source = bed.source(endpoint=proxy.url)

    async def go() -> None:
        found = await source.locate(AdapterName.parse("acme/large"), "")
        fetching = asyncio.create_task(bed.store.obtain(found, lambda arriving: source.fetch(found, arriving), check))
        while not proxy.bytes_sent(WEIGHTS_FILE):
            await asyncio.sleep(0.01)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        # Nobody waited for its thread, which looks up after a piece.
        assert 0 < proxy.bytes_sent(WEIGHTS_FILE) < constants.DOWNLOAD_CHUNK_SIZE

    asyncio.run(go())
    assert bed.leftovers() == []
    assert proxy.bytes_sent(WEIGHTS_FILE) < len(large[WEIGHTS_FILE])


def test_a_download_without_its_directory_leaves_nothing(bed, proxy):
    # Cancelled before it has begun to write, huggingface_hub makes the folders for it again.
    found = located(bed, "team/sql")
    proxy.plan(faults.stall(0.5), method="HEAD", path=WEIGHTS_FILE)
    proxy.plan(faults.status(403), method="HEAD", path=CONFIG_FILE)
    with pytest.raises(SourceUnavailable, match="HTTP 403"):
        bed.obtain(bed.source(endpoint=proxy.url), found)
    assert bed.leftovers() == []


def test_one_file_that_fails_ends_the_others(bed, server, proxy):
    found = located(bed, "team/sql", token=server.user("hf_any"))
    proxy.plan(faults.throttle(500), method="GET", path=WEIGHTS_FILE, times=None)
    proxy.plan(
        faults.status(404, headers={"X-Error-Code": "EntryNotFound"}), method="HEAD", path=CONFIG_FILE, times=None
    )
    with pytest.raises(VersionChanged):
        bed.obtain(bed.source(endpoint=proxy.url), found)
    assert proxy.bytes_sent(WEIGHTS_FILE) < len(FILES[WEIGHTS_FILE])
    assert bed.leftovers() == []


def test_an_unwritable_store_is_reported_by_the_store(bed, tmp_path, monkeypatch):
    found = located(bed, "team/sql")
    source = bed.source()

    async def fetch(arriving) -> None:
        arriving.directory.rmdir()
        arriving.directory.write_bytes(b"in the way")
        await source.fetch(found, arriving)

    with pytest.raises(SourceUnavailable, match="LORA_PLUGINS_STORE_DIR"):
        asyncio.run(bed.store.obtain(found, fetch, check))


def test_uris_of_located_adapters_lead_back_to_them(bed, server):
    server.commit("acme/odd", {f"a b/100%/é:x/{n}": d for n, d in FILES.items()})
    uri = SourceUri.parse(located(bed, "acme/odd/a b/100%/é:x").uri)
    assert bed.serve("acme/odd/a b/100%/é:x") == FILES
    assert (uri.repo, uri.subfolder) == ("acme/odd", "a b/100%/é:x")
