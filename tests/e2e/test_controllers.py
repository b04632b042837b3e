"""Controllers of clusters that load adapters by vLLM's own calls, from another address, with a key and without one."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.models import PROMPT
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server
from tests.e2e.test_administrators import _address_beside_loopback

KEY = "key-of-the-controller"
HEADERS = {"Authorization": f"Bearer {KEY}"}
WITHOUT_ADMIN = (RESOLVER, MANAGER, KERNELS)
# Of each row of the page: settings, options of `vllm serve`, plugins; statuses from another address with the key and
# without one, and from the server's own without one.
ROWS = {
    "no key": ({}, (), (*WITHOUT_ADMIN, ADMIN), (403, 403, 200)),
    "admin key": ({"LORA_PLUGINS_ADMIN_KEY": KEY}, (), (*WITHOUT_ADMIN, ADMIN), (200, 401, 401)),
    "policy": ({"LORA_PLUGINS_POLICY": "{home}/policy.toml"}, (), (*WITHOUT_ADMIN, ADMIN), (200, 403, 403)),
    "api key": ({}, ("--api-key", KEY), (*WITHOUT_ADMIN, ADMIN), (200, 401, 401)),
    "without lora_admin": ({}, (), WITHOUT_ADMIN, (200, 200, 200)),
}
# As NeMo's platform starts its servers of vLLM itself, and with all of ours; what KServe's container is told besides.
NEMO = {"as it starts them": (RESOLVER,), "all plugins": ("lora_plugins",)}
KSERVE_NAMES = "publishers/shop/models/{}"
QUICK = ("admin key", "without lora_admin")  # test_administrators.py and test_access.py load by the other ways
CASES = [pytest.param(row, marks=[] if row in QUICK else [pytest.mark.nightly]) for row in ROWS]


def calls(path: Path) -> tuple[tuple[str, dict[str, Any]], ...]:
    """What is sent: by AIBrix 0.8.0's runtime (`openapi/engine/vllm.py`), then by lora-syncer (`sidecar.py`).

    The controllers of production-stack and AIBrix send lora-syncer's fields but `base_model_name`.
    """
    return (
        ("load", {"lora_name": "tuned", "lora_path": str(path)}),
        ("unload", {"lora_name": "tuned", "lora_int_id": None}),
        ("load", {"lora_name": "tuned", "lora_path": str(path), "base_model_name": "base"}),
        ("unload", {"lora_name": "tuned"}),
    )


@pytest.mark.parametrize("row", CASES)
def test_controllers_load_and_unload_as_the_page_says(bed: Bed, tmp_path: Path, row: str) -> None:
    settings, options, plugins, statuses = ROWS[row]
    (tmp_path / "adapters").mkdir()
    (tmp_path / "policy.toml").write_text(f'[tenants.controller]\nkeys = ["{KEY}"]\nadmin = true\n')
    settings = {name: text.format(home=tmp_path) for name, text in settings.items()}
    path = shutil.copytree(bed.adapters / "sql", tmp_path / "elsewhere" / "sql")
    arguments = ("--host", "0.0.0.0", "--served-model-name", "base", *options)
    with lora_server(bed, tmp_path, *arguments, plugins=plugins, **settings) as server:
        far = server.url.replace("127.0.0.1", _address_beside_loopback())
        ways = ((far, HEADERS), (far, {}), (server.url, {}))
        for (url, headers), status in zip(ways, statuses, strict=True):
            with httpx.Client(base_url=url, headers=headers, timeout=240) as client:
                for verb, body in calls(path):
                    answer = client.post(f"/v1/{verb}_lora_adapter", json=body)
                    assert (answer.status_code, answer.text.partition(" ")[0] == "Success:") == (status, status == 200)
                    if status == 200 and verb == "load":
                        asked = {"model": "tuned", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
                        said = client.post("/v1/completions", json=asked | {"return_token_ids": True}).json()
                        assert said["choices"][0]["token_ids"] == bed.answers["sql"]
                        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
                        assert (cards["tuned"]["parent"], cards["tuned"]["root"]) == ("base", str(path))
                        again = client.post("/v1/load_lora_adapter", json=body)
                        assert (again.status_code, "already been loaded" in again.text) == (400, True)
                        assert client.post("/v1/load_lora_adapter", json=body | {"load_inplace": True}).is_success
                    elif status == 200:
                        assert "tuned" not in client.get("/v1/models").text
                        assert client.post("/v1/unload_lora_adapter", json=body).status_code == 404


def ask(client: httpx.Client, name: str) -> httpx.Response:
    asked = {"model": name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=asked | {"return_token_ids": True})


def token_ids(client: httpx.Client, name: str) -> list[int]:
    answer = ask(client, name)
    assert (answer.status_code, answer.headers.get("x-lora-warning")) == (200, None), answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def cards(client: httpx.Client) -> dict[str, tuple[str | None, str]]:
    return {card["id"]: (card["parent"], card["root"]) for card in client.get("/v1/models").json()["data"]}


def wait_for_listing(client: httpx.Client, name: str, *, is_listed: bool) -> None:
    ends_at = time.monotonic() + 30
    while (name in cards(client)) != is_listed:
        assert time.monotonic() < ends_at, cards(client)
        time.sleep(0.2)


def renamed_into_place(source: Path, target: Path, base: Path) -> None:
    """As NeMo's adapters sidecar: written beside the place under a hidden name, its base renamed, then moved there."""
    hidden = shutil.copytree(source, target.with_name(f".{target.name}.tmp"))
    config = json.loads((hidden / "adapter_config.json").read_text())
    (hidden / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    (hidden / "nmp_adapter_meta.json").write_text('{"fileset": "sql", "updated_at": null}')
    shutil.rmtree(target, ignore_errors=True)
    hidden.rename(target)


@pytest.mark.parametrize(
    "plugins", [pytest.param(NEMO["as it starts them"], marks=pytest.mark.nightly), NEMO["all plugins"]], ids=list(NEMO)
)
def test_nemo_names_loads_replaces_and_removes(bed: Bed, tmp_path: Path, plugins: tuple[str, ...]) -> None:
    base, name = tmp_path / "model-store", "default--sql"
    base.symlink_to(bed.base)
    place = tmp_path / "adapters" / name
    place.parent.mkdir()
    load, unload = {"lora_name": name, "lora_path": str(place)}, {"lora_name": name}
    arguments = ("--served-model-name", "default/base")
    settings = {"LORA_PLUGINS_LIST": "all", "LORA_PLUGINS_REVALIDATE_S": "1"}
    with (
        lora_server(replace(bed, base=base), tmp_path, *arguments, plugins=plugins, **settings) as server,
        httpx.Client(base_url=server.url, timeout=240) as client,
    ):
        shutil.copytree(bed.adapters / "sql", place.with_name(f".{name}.tmp"))
        renamed = place.with_name("default--chat")
        renamed_into_place(bed.adapters / "chat", renamed, base)
        wait_for_listing(client, "default--chat", is_listed=True)  # nobody has asked for the name
        assert cards(client) == {"default/base": (None, str(base)), renamed.name: ("default/base", renamed.name)}
        shutil.rmtree(place.with_name(f".{name}.tmp"))

        renamed_into_place(bed.adapters / "sql", place, base)
        assert client.post("/v1/load_lora_adapter", json=load).text.startswith("Success:")
        again = client.post("/v1/load_lora_adapter", json=load)  # at every interval
        assert (again.status_code, "already" in again.text) == (400, True)
        assert cards(client)[name] == ("default/base", str(place))
        assert token_ids(client, name) == bed.answers["sql"]

        renamed_into_place(bed.adapters / "wide", place, base)
        assert client.post("/v1/unload_lora_adapter", json=unload).status_code == 200
        assert token_ids(client, name) == bed.answers["wide"]  # found in the directory, before the load
        assert "already" in client.post("/v1/load_lora_adapter", json=load).text.lower()
        assert client.post("/v1/unload_lora_adapter", json=unload).status_code == 200
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
        assert token_ids(client, name) == bed.answers["wide"]

        assert client.post("/v1/unload_lora_adapter", json=unload).status_code == 200
        shutil.rmtree(place)
        wait_for_listing(client, name, is_listed=False)
        assert client.post("/v1/unload_lora_adapter", json=unload).status_code == 404
        assert ask(client, name).status_code == 404


def test_kserve_arguments_serve_both_names(bed: Bed, tmp_path: Path) -> None:
    """An adapter of `spec.model.lora.adapters` has two names at one path; a mounted directory brings in others."""
    base = tmp_path / "mnt" / "models"
    path = shutil.copytree(bed.adapters / "sql", tmp_path / "mnt" / "lora" / "sql")
    base.symlink_to(bed.base)
    shutil.copytree(bed.adapters / "chat", tmp_path / "adapters" / "chat")
    names = ["sql", KSERVE_NAMES.format("sql")]
    modules = [json.dumps({"name": name, "path": str(path)}) for name in names]
    served = ("--served-model-name", "base", KSERVE_NAMES.format("base"))
    arguments = ("--lora-modules", *modules, *served)
    with (
        lora_server(replace(bed, base=base), tmp_path, *arguments, plugins=("lora_plugins",)) as server,
        httpx.Client(base_url=server.url, timeout=240) as client,
    ):
        assert client.get("/health").status_code == 200
        listed = cards(client)
        assert listed == {name: (None, str(base)) for name in served[1:]} | {
            name: ("base", str(path)) for name in names
        }
        for name in names:
            assert token_ids(client, name) == bed.answers["sql"]
        for name in served[1:]:
            assert token_ids(client, name) == bed.answers[None]
        assert token_ids(client, "chat") == bed.answers["chat"]
        assert ask(client, KSERVE_NAMES.format("chat")).status_code == 404
