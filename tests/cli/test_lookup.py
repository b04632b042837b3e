"""`pull`, `why` and `inspect` from S3 and the Hub, by name and by URI, and the bar on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lora_plugins.cli import Exit
from testbed import faults
from testbed.hub import Hub, local_hub
from testbed.proxy import fault_proxy
from testbed.s3 import S3, s3_server
from tests.cli.common import on_terminal, outside
from tests.make import adapter_files


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        server.bucket("adapters").put_many("loras/sql", adapter_files())
        server.bucket("adapters").put_many("loras/broken", {**adapter_files(), "adapter_config.json": b"{"})
        yield server


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with local_hub() as running:
        running.commit("acme/many", {f"en/{name}": data for name, data in adapter_files(lora_alpha=16).items()})
        running.commit("acme/secret", adapter_files())
        running.private("acme/secret")
        yield running


@pytest.fixture
def env(cli, s3, hub) -> dict[str, str]:
    return {
        **cli.env,
        **s3.env(),
        **hub.env(cli.root / "home"),
        "VLLM_PLUGINS": "lora_filesystem_resolver,lora_s3_resolver,lora_hf_hub_resolver",
        "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}",
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": "acme/*",
    }


def test_names_are_asked_of_every_source_in_order(env, cli):
    done = outside("why", "acme/many/en", "--json", env=env)
    assert done.code == Exit.NOT_COMPARED
    steps = {step["step"]: step["verdict"] for step in done.only["steps"]}
    assert list(steps) == ["name", "server", "filesystem", "s3", "hub", "store", "adapter", "base"]
    assert [steps[source] for source in ("filesystem", "s3", "hub")] == ["no", "no", "yes"]
    cli.env = {**env, "LORA_PLUGINS_SOURCES": "s3"}
    done = cli("why", "sql", "--json")
    steps = {step["step"]: step["verdict"] for step in done.only["steps"]}
    assert [steps[source] for source in ("s3", "filesystem", "hub")] == ["yes", "not asked", "not asked"]


def test_an_unavailable_source_hides_no_later_one(env):
    done = outside("why", "acme/many/en", "nobody", "--json", env={**env, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    assert (done.code, done.err) == (Exit.UNAVAILABLE, ""), "and not what a library logs of its retries"
    found, unavailable = done.json["adapters"]
    steps = {step["step"]: step["verdict"] for step in found["steps"]}
    assert (found["verdict"], steps["s3"], steps["hub"]) == ("not compared", "failed", "yes")
    assert unavailable["verdict"] == "unavailable"
    assert [step["step"] for step in unavailable["steps"] if step["verdict"] == "failed"] == ["s3"]
    assert "[L006] adapter 'nobody'" in unavailable["error"]["message"]


def test_names_and_uris_are_pulled(env, cli):
    uris = {
        "acme/many/en": ("hub", "hf://acme/many/en"),
        "s3://adapters/loras/sql": ("s3", "s3://adapters/loras/sql"),
    }
    done = outside("pull", *uris, "--json", env=env)
    done.assert_no_traceback()
    assert (done.code, done.err) == (Exit.OK, "")
    for answer, uri in zip(done.json["adapters"], uris.values(), strict=True):
        assert (answer["source"], answer["uri"], answer["fetched"]) == (*uri, True)
        assert answer["size_bytes"] == sum(
            (cli.store / answer["digest"] / name).stat().st_size
            for name in ("adapter_config.original.json", "adapter_model.safetensors")
        )
    of_hub, of_s3 = (answer["digest"] for answer in done.json["adapters"])
    again = outside("pull", *uris, "hf://acme/many@main/en", "--json", env=env).json["adapters"]
    assert [(it["digest"], it["fetched"], it["bytes_s"]) for it in again] == [
        (digest, False, None) for digest in (of_hub, of_s3, of_hub)
    ]
    assert again[2]["uri"] == "hf://acme/many/en"
    uris_of = {"hf://acme/many@main/en": "hf://acme/many/en", of_s3[:12]: "s3://adapters/loras/sql"}
    inspected = outside("inspect", *uris_of, "--json", env=env).json["adapters"]
    assert [it["uri"] for it in inspected] == [*uris_of.values()]
    assert {(it["verdict"], len(it["modules"])) for it in inspected} == {("not compared", 4)}


def test_what_cannot_be_had(env):
    codes = {
        "hf://acme/secret": "L006",
        "hf://acme/none": "L006",  # the Hub does not tell anonymous clients missing from private
        "hf://acme/many/nothing": "L002",
        "s3://adapters/loras/none": "L002",
        "s3://nowhere/sql": "L006",
        "s3://adapters/loras/broken": "L005",
        "hf://acme": "L005",
    }
    done = outside("pull", *codes, "--json", env=env)
    done.assert_no_traceback()
    assert (done.code, done.err) == (Exit.UNAVAILABLE, "")
    assert [it["error"]["code"] for it in done.json["adapters"]] == [*codes.values()]


def test_what_the_sources_can_list(env, s3):
    env = {**env, "VLLM_LORA_RESOLVER_HF_REPO_LIST": "acme/many,other/*"}
    done = outside("ls", "--remote", "--json", env=env)
    assert (done.code, done.err) == (Exit.OK, "")
    found = {(row["source"], row["name"]) for row in done.json["adapters"]}
    assert found == {
        ("filesystem", "cut"), ("filesystem", "sql"), ("filesystem", "team/poet"),
        ("s3", "broken"), ("s3", "sql"),
        ("hub", "acme/many/en"),
    }  # fmt: skip
    gaps = {source["source"]: source["not_listed"] for source in done.json["sources"]}
    assert gaps == {"filesystem": [], "s3": [], "hub": ["other/*: all of an owner's repositories"]}
    away = {
        **env,
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "S3_PATH_TEMPLATE": "s3://adapters/{base_model_name}/{lora_name}",
    }
    assert "needs --base-model" in outside("ls", "--remote", env=away).out
    done = outside("ls", "--remote", "--base-model", "loras", env=away)
    assert (done.code, "acme/many/en" in done.out, "[L006]" in done.out) == (Exit.UNAVAILABLE, True, True)
    named = outside(
        "ls",
        "--remote",
        "--base-model",
        "loras",
        "--json",
        env={**away, "AWS_ENDPOINT_URL": s3.env()["AWS_ENDPOINT_URL"]},
    )
    assert [row["name"] for row in named.json["adapters"] if row["source"] == "s3"] == ["broken", "sql"]


def test_bars_for_each_adapter_and_for_all(env, cli, s3):
    cli.env = env
    with fault_proxy(s3.url) as proxy:
        proxy.plan(faults.stall(1.0), method="GET", path="adapter_model.safetensors")
        at = {"TERM": "xterm", "COLUMNS": "120", "AWS_ENDPOINT_URL": proxy.url}
        shown = on_terminal(cli, "pull", "s3://adapters/loras/sql", "team/poet", "acme/many/en", env=at)
        assert re.search(r"^.*sql .*B", shown, re.MULTILINE)
        assert re.search(r"0%|/2\.1 kB|bytes/s|kB/s", shown)
        assert "fetched in" in shown
        assert re.search(r"\d of 3 adapters", shown)
        cli.env = {**env, "LORA_PLUGINS_STORE_DIR": str(cli.root / "other-store")}
        proxy.plan(faults.stall(1.0), method="GET", path="adapter_model.safetensors")
        quiet = on_terminal(cli, "pull", "s3://adapters/loras/sql", "team/poet", "-q", env=at)
    assert quiet == ""
    piped = outside("pull", "s3://adapters/loras/sql", env=env)
    assert (piped.code, piped.err, "was there" in piped.out) == (Exit.OK, "", True)
