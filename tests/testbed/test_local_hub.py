"""The real `huggingface_hub` works against the local Hub, and meets its errors as the exceptions it documents."""

from __future__ import annotations

import os
from pathlib import Path

import httpx2
import huggingface_hub as hf
import pytest
from huggingface_hub import constants, errors

from testbed.hub import Hub, local_hub

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
