"""The real `huggingface_hub` works against the local Hub, and meets its errors as the exceptions it documents."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import huggingface_hub as hf
import pytest
from huggingface_hub import constants, errors

from testbed import faults
from testbed.hub import Hub, local_hub
from testbed.proxy import fault_proxy

WEIGHTS = os.urandom(100_000)
FILES = {
    "adapter_config.json": b'{"r": 8}',
    "adapter_model.safetensors": WEIGHTS,
    "README.md": b"hello",
    "sub/dir/adapter_model.safetensors": b"other",
}


@pytest.fixture(scope="module")
def server():
    with local_hub() as running:
        yield running


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    server.reset()
    server.commit("team/sql", FILES)
    # The machine's own token, if it has one, must not come along.
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.forget()
    return server


def api(hub: Hub, token: str | bool | None = None) -> hf.HfApi:
    return hf.HfApi(endpoint=hub.url, token=token)


def download(hub: Hub, tmp_path: Path, name: str = "adapter_model.safetensors", **more) -> Path:
    more = {"repo_id": "team/sql", "cache_dir": tmp_path, "endpoint": hub.url, **more}
    return Path(hf.hf_hub_download(filename=name, **more))


def test_info_has_commit_sizes_and_digests(hub):
    info = api(hub).model_info("team/sql", files_metadata=True)
    head = hub.commit("team/sql", {"adapter_config.json": b'{"r": 16}'})
    assert info.id == "team/sql"
    assert info.sha != head == api(hub).model_info("team/sql").sha
    files = {f.rfilename: f for f in info.siblings}
    assert {name: f.size for name, f in files.items()} == {name: len(data) for name, data in FILES.items()}
    assert files["adapter_model.safetensors"].lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert files["adapter_config.json"].lfs is None
    assert files["README.md"].blob_id == hashlib.sha1(b"blob 5\0hello").hexdigest()


def test_branches_tags_and_commits_are_revisions(hub):
    first = api(hub).model_info("team/sql").sha
    hub.tag("team/sql", "v1")
    second = hub.commit("team/sql", {"README.md": None}, branch="feature/x", title="Drop it")
    revisions = {r: api(hub).model_info("team/sql", revision=r).sha for r in ("main", "v1", first, "feature/x", second)}
    assert revisions == {"main": first, "v1": first, first: first, "feature/x": second, second: second}
    refs = api(hub).list_repo_refs("team/sql")
    assert {b.name: b.target_commit for b in refs.branches} == {"main": first, "feature/x": second}
    assert {t.name: t.target_commit for t in refs.tags} == {"v1": first}
    history = api(hub).list_repo_commits("team/sql", revision="feature/x")
    assert [(c.commit_id, c.title) for c in history] == [(second, "Drop it"), (first, "Update")]


@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_tree_in_pages(hub, page_size, monkeypatch):
    monkeypatch.setattr(hub, "page_size", page_size)
    top = api(hub).list_repo_tree("team/sql")
    assert [e.path for e in top] == ["README.md", "adapter_config.json", "adapter_model.safetensors", "sub"]
    everything = list(api(hub).list_repo_tree("team/sql", recursive=True))
    assert sorted(e.path for e in everything) == sorted([*FILES, "sub", "sub/dir"])
    assert [e.path for e in api(hub).list_repo_tree("team/sql", "sub/dir")] == ["sub/dir/adapter_model.safetensors"]
    assert sorted(api(hub).list_repo_files("team/sql")) == sorted(FILES)
    with pytest.raises(errors.EntryNotFoundError):
        list(api(hub).list_repo_tree("team/sql", "none"))


@pytest.mark.parametrize("redirects", [False, True])
def test_download_of_one_file(hub, tmp_path, redirects, monkeypatch):
    monkeypatch.setattr(hub, "redirects", redirects)
    hub.user("hf_someone")
    path = download(hub, tmp_path, token="hf_someone")
    assert path.read_bytes() == WEIGHTS
    assert path.parent.name == api(hub).model_info("team/sql").sha
    assert path.resolve().name == hashlib.sha256(WEIGHTS).hexdigest()
    assert download(hub, tmp_path, "sub/dir/adapter_model.safetensors").read_bytes() == b"other"
    assert hub.count("GET", r"^/team/sql/resolve/main/adapter_model" if not redirects else r"^/-/") == 1 + redirects
    assert not any(r.authorized for r in hub.requests(path="^/-/"))
    download(hub, tmp_path)
    assert sum(r.sent for r in hub.requests("GET", "resolve|/-/")) == len(WEIGHTS) + len(b"other")


def test_snapshot_of_chosen_files_at_a_revision(hub, tmp_path):
    hub.tag("team/sql", "v1")
    first = api(hub).model_info("team/sql").sha
    hub.commit("team/sql", {"adapter_config.json": b"{}"})
    where = hf.snapshot_download(
        "team/sql", revision="v1", allow_patterns=["adapter_*"], cache_dir=tmp_path, endpoint=hub.url, max_workers=2
    )
    assert Path(where).name == first
    assert {p.name: p.read_bytes() for p in Path(where).iterdir()} == {
        name: FILES[name] for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    assert hub.count("GET", "README") == 0


def test_models_of_an_author(hub, monkeypatch):
    hub.commit("team/poet", {"a": b"1"})
    hub.commit("other/sql", {"a": b"1"})
    hub.private("team/poet", ["hf_reader"])
    assert [m.id for m in api(hub).list_models(author="team")] == ["team/sql"]
    monkeypatch.setattr(hub, "page_size", 1)
    assert [m.id for m in api(hub, "hf_reader").list_models(author="team")] == ["team/poet", "team/sql"]
    assert [m.id for m in api(hub).list_models(search="SQL", limit=1)] == ["other/sql"]


def test_missing_repositories_and_files_are_not_found(hub, tmp_path):
    hub.user("hf_someone")
    for token, status in ((False, 401), ("hf_someone", 404)):
        with pytest.raises(errors.RepositoryNotFoundError) as caught:
            api(hub, token).model_info("team/none")
        assert caught.value.response.status_code == status
    with pytest.raises(errors.RevisionNotFoundError):
        api(hub).model_info("team/sql", revision="v9")
    with pytest.raises(errors.RevisionNotFoundError):
        download(hub, tmp_path, revision="v9")
    with pytest.raises(errors.RemoteEntryNotFoundError):
        download(hub, tmp_path, "none.json")
    assert (tmp_path / "models--team--sql" / ".no_exist").exists()


def test_private_repositories_look_missing_without_the_right_token(hub, tmp_path):
    hub.private("team/sql", ["hf_reader"])
    hub.user("hf_someone")
    for token in (False, "hf_someone"):
        with pytest.raises(errors.RepositoryNotFoundError) as caught:
            download(hub, tmp_path, token=token)
        assert not isinstance(caught.value, errors.GatedRepoError)
    assert download(hub, tmp_path, token="hf_reader").read_bytes() == WEIGHTS
    assert api(hub, "hf_reader").model_info("team/sql").private is True


def test_gated_repositories_are_listed_but_not_readable(hub, tmp_path):
    hub.gated("team/sql", ["hf_reader"])
    hub.user("hf_someone")
    assert api(hub, False).model_info("team/sql").gated == "manual"
    for token, status in ((False, 401), ("hf_someone", 403)):
        with pytest.raises(errors.GatedRepoError) as caught:
            download(hub, tmp_path, token=token)
        assert caught.value.response.status_code == status
    with pytest.raises(errors.GatedRepoError):
        api(hub, "hf_someone").auth_check("team/sql")
    assert download(hub, tmp_path, token="hf_reader").read_bytes() == WEIGHTS


def test_an_unknown_token_is_refused_even_for_public_repositories(hub):
    with pytest.raises(errors.HfHubHTTPError) as caught:
        api(hub, "hf_stale").model_info("team/sql")
    assert not isinstance(caught.value, errors.RepositoryNotFoundError)
    assert caught.value.response.status_code == 401
    assert api(hub, hub.user("hf_ok", "me")).whoami()["name"] == "me"


def test_a_renamed_repository_redirects(hub, tmp_path):
    hub.move("team/sql", "team/sql2")
    assert api(hub).model_info("team/sql", revision="main", files_metadata=True).id == "team/sql2"
    assert download(hub, tmp_path).read_bytes() == WEIGHTS


def test_an_outage_and_what_is_cached_meanwhile(hub, tmp_path):
    kept = download(hub, tmp_path)
    hub.refuse()
    try:
        with pytest.raises(httpx2.ConnectError):
            api(hub).model_info("team/sql")
        assert download(hub, tmp_path) == kept
        assert download(hub, tmp_path, local_files_only=True) == kept
        with pytest.raises(errors.LocalEntryNotFoundError):
            download(hub, tmp_path, "README.md", local_files_only=True)
    finally:
        hub.refuse(False)
    assert api(hub).model_info("team/sql").id == "team/sql"


def test_a_body_that_is_cut_is_resumed_with_a_range(hub, tmp_path, monkeypatch):
    # The client keeps whole pieces only, of 10 MB by default: what is cut before the first is fetched again.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    with fault_proxy(hub.url) as proxy:
        proxy.plan(faults.short(after=60_000), method="GET", path="resolve")
        assert download(hub, tmp_path, endpoint=proxy.url).read_bytes() == WEIGHTS
        ranges = [r.range for r in proxy.requests("GET", "resolve")]
    assert ranges == [None, "bytes=60000-"]


def test_a_flipped_byte_is_not_noticed_by_the_client(hub, tmp_path):
    with fault_proxy(hub.url) as proxy:
        proxy.plan(faults.flip(500), method="GET", path="resolve")
        path = download(hub, tmp_path, endpoint=proxy.url)
    # The blob carries the SHA-256 in its name all the same: verification is up to whoever reads it.
    assert path.resolve().name == hashlib.sha256(WEIGHTS).hexdigest()
    assert path.read_bytes() != WEIGHTS


def test_environment_alone_configures_the_client(hub, tmp_path):
    hub.private("team/sql", ["hf_reader"])
    code = "import huggingface_hub as h; print(h.snapshot_download('team/sql', allow_patterns='adapter_*'))"
    for token, works in (("hf_reader", True), (None, False)):
        env = {**os.environ, **hub.env(tmp_path / str(token), token=token)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is works, done.stderr
    env = {**os.environ, **hub.env(tmp_path / "hf_reader"), "HF_HUB_OFFLINE": "1"}
    hub.forget()
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert (Path(done.stdout.strip()) / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert hub.count() == 0
