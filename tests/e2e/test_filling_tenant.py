"""On a real server: a tenant's pushed names use its share up, and the adapters of others are still served."""

from __future__ import annotations

import shutil
from collections import deque
from functools import partial
from pathlib import Path

import httpx
import pytest

from lora_plugins.client import CallFailed, push
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import PROMPT, edit_config
from testbed.server import Server
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

POLICY = """
[tenants.filler]
keys = ["key-f"]
adapters = ["filler/*"]
pushes = ["filler/*"]
[tenants.other]
keys = ["key-o"]
adapters = ["other/*"]
"""
LARGEST = "wide"
OTHERS = {f"other/{number}": ("sql", "chat", "stable", LARGEST)[number % 4] for number in range(8)}


def asked(server: Server, bed: Bed, names: dict[str, str], key: str) -> None:
    """Each name answers as its original."""
    client = connect(server).with_options(api_key=key)
    for name, original in names.items():
        answer = complete(client, name, PROMPT, MAX_TOKENS)
        assert (answer.status, answer.error, list(answer.token_ids)) == (200, "", bed.answers[original]), name


def test_pushed_names_take_no_more_than_their_tenants_share(bed: Bed, tmp_path: Path) -> None:
    for name, original in OTHERS.items():
        shutil.copytree(bed.adapters / original, tmp_path / "adapters" / name)
    (tmp_path / "policy.toml").write_text(POLICY)
    room = 4 * sum(file.stat().st_size for file in (bed.adapters / LARGEST).iterdir())
    with admin_server(
        bed,
        tmp_path,
        *("--max-loras", "2", "--max-cpu-loras", "4", "--api-key", "key-f", "key-o"),
        LORA_PLUGINS_STORE_MAX_BYTES=f"{room}",
        LORA_PLUGINS_POLICY=str(tmp_path / "policy.toml"),
    ) as server:
        pushed: dict[str, str] = {}

        def fill(number: int) -> None:
            policy = shutil.copytree(bed.adapters / "chat", tmp_path / f"step-{number}")
            edit_config(policy, revision=f"{number}")  # other bytes, so another entry of the store
            push(f"filler/{number}", policy, servers=[server.url], key="key-f")
            pushed[f"filler/{number}"] = "chat"

        with pytest.raises(CallFailed, match=r"507.*L004.*the key's share"):
            deque(map(fill, range(200)))
        assert len(pushed) > 4
        asked(server, bed, OTHERS, "key-o")
        asked(server, bed, pushed, "key-f")
        # A name that is pushed again takes no more; a version that was larger may not come back by a rollback.
        large = shutil.copytree(bed.adapters / LARGEST, tmp_path / "large")
        push("filler/0", tmp_path / "step-0", servers=[server.url], key="key-f")
        with pytest.raises(CallFailed, match=r"507.*L004"):
            push("filler/0", large, servers=[server.url], key="key-f")
        call = partial(httpx.request, headers={"Authorization": "Bearer key-f"}, timeout=LONGEST_S)
        unloaded = list(pushed)[1:-1]
        for name in unloaded:
            assert call("DELETE", f"{server.url}/v1/loras/{name}").status_code == 200
        push("filler/0", large, servers=[server.url], key="key-f")
        push("filler/0", tmp_path / "step-0", servers=[server.url], key="key-f")
        for name in unloaded:
            push(name, tmp_path / f"step-{name.partition('/')[2]}", servers=[server.url], key="key-f")
        rollback = call("POST", f"{server.url}/v1/loras/filler/0/rollback")
        assert (rollback.status_code, "the key's share" in rollback.text) == (507, True), rollback.text
        asked(server, bed, pushed, "key-f")
