"""Controllers of clusters that load adapters by vLLM's own calls, from another address, with a key and without one."""

from __future__ import annotations

import shutil
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
