"""What the guides and the operators' pages ask a reader to write is what the code reads."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import aiohttp.client
import httpx
import openai
import pytest

from lora_plugins import errors, events
from lora_plugins.api.access.policy import Policy
from lora_plugins.lifecycle import declared_file
from lora_plugins.log import logger
from lora_plugins.observability.logs import LogEvents
from lora_plugins.plugin_names import EVERYTHING, OURS
from lora_plugins.ray import __main__ as ray_command
from lora_plugins.resolvers.sources.retries import look_up_timeout_s
from lora_plugins.resolvers.sources.uri import AllowedUris
from lora_plugins.settings import VARIABLES, Settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "docs" / "guides").glob("*.md")), *sorted((ROOT / "docs" / "operate").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
DECLARES = {"admin", "kubernetes", "migrating"}  # pages with a file of adapters


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_plugins_and_codes_of_a_page_exist(page):
    text = page.read_text()
    assert set(re.findall(r"\bLORA_PLUGINS_[A-Z0-9_]*[A-Z0-9]\b", text)) <= set(VARIABLES)
    named = {name for names in re.findall(r"VLLM_PLUGINS=([\w,]+)", text) for name in names.split(",")}
    assert named <= {EVERYTHING, *OURS}
    codes = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")}
    assert set(re.findall(r"\bL0\d\d\b", text)) <= codes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_adapters_that_a_page_declares_can_be_followed(page):
    allowed = AllowedUris.parse(["s3://adapters", "hf://algoprog", "hf://acme"])
    files = [
        textwrap.dedent(declared[0])
        for language, block in BLOCK.findall(page.read_text())
        if language == "yaml" and (declared := re.search(r"^( *)adapters:\n(?: .*\n)+", block, re.MULTILINE))
    ]
    assert bool(files) == (page.stem in DECLARES)
    for file in files:
        assert declared_file.parse(file.encode(), page, allowed)


def test_policy_of_the_page_on_tenants_is_as_it_says(tmp_path):
    page = (ROOT / "docs" / "guides" / "tenants.md").read_text()
    (script,) = [block for _, block in BLOCK.findall(page) if "policy.toml <<END" in block]
    script = script.partition("LORA_PLUGINS_POLICY=")[0]
    keys = {"team_a": "key-a", "team_b": "key-b", "operators": "key-o"}
    given = "".join(f"{name}={key}\n" for name, key in keys.items())
    subprocess.run(["bash", "-euc", given + script], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "policy.toml").stat().st_mode & 0o077 == 0
    text = (tmp_path / "policy.toml").read_text()
    assert hashlib.sha256(b"key-a").hexdigest() in text
    Policy.parse(text)


def test_permissions_of_the_page_on_kubernetes_are_json():
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    (permissions,) = [block for language, block in BLOCK.findall(page) if language == "json"]
    assert {one["Action"] for one in json.loads(permissions)["Statement"]} == {"s3:ListBucket", "s3:GetObject"}


def test_time_outs_of_clients_are_those_of_the_page():
    page = (ROOT / "docs" / "guides" / "first-request.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)`(?: for Python)? \| ([^|]+) \|", page, re.MULTILINE))
    with openai.OpenAI(api_key="none", base_url="http://localhost") as client:
        assert (client.timeout.read, client.max_retries) == (600, 2)
    assert rows["openai"] == "600 s, then two retries"
    with httpx.Client() as client:
        assert rows["httpx"] == f"{client.timeout.read:g} s"
    assert rows["aiohttp"] == f"{aiohttp.client.DEFAULT_TIMEOUT.total:g} s in all"


def test_deadlines_for_first_requests_are_those_of_the_code():
    page = (ROOT / "docs" / "guides" / "first-request.md").read_text()
    fetch_timeout_s = Settings.from_env({}).fetch_timeout_s
    assert f"`LORA_PLUGINS_FETCH_TIMEOUT_S`, {fetch_timeout_s:g} s" in page
    ((most_s, waits_s),) = re.findall(r"`LORA_PLUGINS_FETCH_MAX_S=(\d+)`, (\d+) s suffice", page)
    assert int(waits_s) > look_up_timeout_s(fetch_timeout_s) + int(most_s) > fetch_timeout_s
    assert f"proxy_read_timeout {waits_s}s;" in page
    assert f"{look_up_timeout_s(fetch_timeout_s):g} s for each source" in page


def test_progress_of_first_requests_is_shown_as_logged(monkeypatch, caplog):
    page = (ROOT / "docs" / "guides" / "first-request.md").read_text()
    event = events.FetchGoesOn("team/sql", "s3", arrived_bytes=350_100_000, size_bytes=1_200_000_000, took_s=35)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger=logger.name)
    LogEvents()(event)
    assert f"```text\n{caplog.messages[-1]}\n```" in page


def test_commands_for_ray_are_those_of_our_parser():
    page = (ROOT / "docs" / "guides" / "routing.md").read_text()
    (command,) = re.findall(r"^python -m lora_plugins\.ray (.+)$", page, re.MULTILINE)
    parsed = ray_command.parser().parse_args(shlex.split(command))
    assert (parsed.replicas, parsed.num_gpus, parsed.host, parsed.port) == (2, 1, "127.0.0.1", 8000)
    assert parsed.arguments[1:] == ["--enable-lora", "--max-loras", "8", "--max-cpu-loras", "64"]
