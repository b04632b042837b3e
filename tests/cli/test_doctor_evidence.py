"""The doctor is green only with evidence, and says all that a server warns of as it starts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_plugins.cli import Exit
from lora_plugins.cli.doctor import examine
from lora_plugins.findings import State, at_start
from lora_plugins.resolvers.sources import configured
from lora_plugins.settings import Settings
from testbed.s3 import s3_server
from tests.cli.test_checks import S3, around, examined, examined_with
from tests.make import adapter_files, put

VLLM = Path("vllm") / "lora" / "ops" / "torch_ops" / "lora_ops.py"
SELECTS = "def bgmv_shrink(indices):\n    return weights[indices]\n\n\ndef other():\n    return -1\n"
MASKS = "def bgmv_shrink(indices):\n    return (indices == -1)\n"


def sources(root: Path, code: str, version: str) -> Path:
    """A vLLM whose CPU kernels are these."""
    put(root / VLLM.parent, {VLLM.name: code.encode()})
    put(root / f"vllm-{version}.dist-info", {"METADATA": f"Version: {version}\n".encode()})
    return root


@pytest.mark.parametrize(
    ("code", "version", "plugins", "kernels", "is_warned"),
    [
        (SELECTS, "0.32.0+cpu", "lora_lru_manager", "auto", True),
        (SELECTS, "0.32.0+cpu", "lora_lru_manager,lora_kernels", "vllm", True),
        (SELECTS, "0.32.0+cpu", "lora_lru_manager,lora_kernels", "reference", False),
        (SELECTS, "0.32.0", "lora_lru_manager", "auto", False),
        (MASKS, "0.33.0+cpu", "lora_lru_manager", "auto", False),
    ],
)
def test_base_rows_with_an_adapter_are_a_warning(tmp_path, code, version, plugins, kernels, is_warned):
    context = replace(around(*plugins.split(",")), vllm=sources(tmp_path, code, version))
    context = replace(context, env={**context.env, "LORA_PLUGINS_KERNELS": kernels})
    said = [item for item in examine(context) if item.check == "kernels" and "48421" in item.found]
    assert [item.state for item in said] == ([State.WARNING] if is_warned else [])
    assert all("lora_kernels" in item.remedy for item in said)


@pytest.mark.parametrize(
    ("name", "code"), [("lora_filesytem_resolver", Exit.WRONG), ("lora_s3", Exit.WRONG), ("acme_plugin", Exit.OK)]
)
def test_a_misspelt_plugin_of_ours_is_a_problem(cli, name, code):
    assert examined_with(cli, {"VLLM_PLUGINS": name})[0] == code


def test_a_directory_that_is_an_adapter_serves_no_name(cli):
    code, found = examined_with(cli, {"VLLM_LORA_RESOLVER_CACHE_DIR": str(cli.adapters / "sql")})
    (finding,) = [item for item in found["filesystem"] if "is an adapter itself" in item["found"]]
    assert (code, finding["state"]) == (Exit.WRONG, "problem")
    assert f"VLLM_LORA_RESOLVER_CACHE_DIR={cli.adapters}" in finding["remedy"]
    put(cli.adapters / "sql" / "checkpoint-500", adapter_files())
    code, found = examined_with(cli, {"VLLM_LORA_RESOLVER_CACHE_DIR": str(cli.adapters / "sql")})
    assert (code, [item["state"] for item in found["filesystem"]]) == (Exit.OK, ["warning", "on"])


def test_only_what_a_name_can_reach_is_counted(cli):
    put(cli.adapters / ".versions" / "7", adapter_files())
    put(cli.adapters / "team" / ".old", adapter_files())
    _, found = examined_with(cli, {})
    assert found["filesystem"][0]["found"] == f"filesystem ({cli.adapters}): 3 adapters"


SOURCE = SimpleNamespace(label="archives")


@pytest.mark.parametrize(
    ("made", "state", "said", "verdict"),
    [
        ({"zip": lambda env: SOURCE}, "on", "archives of other packages", "served by name from lora_sources;"),
        ({"zip": lambda env: None}, "warning", "zip of other packages: without a setting", "found in lora_sources;"),
        ({}, "warning", "no installed package has a source", "no adapter was found in lora_sources;"),
    ],
)
def test_sources_of_other_packages_are_listed(cli, monkeypatch, made, state, said, verdict):
    points = [SimpleNamespace(name=name, load=partial(lambda it: it, function)) for name, function in made.items()]
    monkeypatch.setattr(configured, "entry_points", lambda group: points)
    cli.env["VLLM_PLUGINS"] = "lora_sources"
    done = cli("doctor", "--no-network", "--json").json
    (finding,) = [item for item in done["findings"] if item["check"] == "sources"]
    assert (finding["state"], said in finding["found"], verdict in done["verdict"]) == (state, True, True)


def test_an_empty_prefix_is_no_proof_of_an_answer(cli):
    with s3_server() as s3:
        bucket = s3.bucket("adapters")
        cli.env |= {**S3, **s3.env(), "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}"}
        _, found = examined(cli)
        assert found["s3"][0]["state"] == "warning"
        assert "s3 (s3://adapters/loras/{lora_name}) has no adapter" in found["s3"][0]["found"]
        assert "correct the setting" in found["s3"][0]["remedy"]
        bucket.put_many("loras/sql", adapter_files())
        _, found = examined(cli)
        assert (found["s3"][0]["state"], found["s3"][0]["found"]) == (
            "on", "s3 (s3://adapters/loras/{lora_name}): 1 adapter",
        )  # fmt: skip
        cli.env["S3_PATH_TEMPLATE"] = "s3://adapters/{base_model_name}/{lora_name}"
        _, found = examined(cli)
        assert "answers; its adapters were not counted" in found["s3"][0]["found"]


def test_variables_of_vllm_count_as_settings(cli):
    _, found = examined_with(cli, {})
    said = found["settings"][0]["found"]
    assert "VLLM_LORA_RESOLVER_CACHE_DIR" in said
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in said
    assert "defaults" not in said
    cli.env = {}
    _, found = examined_with(cli, {})
    assert found["settings"][0]["found"] == "none is set: all at their defaults"


def test_all_that_a_server_warns_of_is_in_the_doctor(cli, tmp_path):
    """One list: each finding of the start, in the words of the log."""
    adapter = put(tmp_path / "sql", adapter_files())
    context = replace(around("lora_filesystem_resolver"), vllm=sources(tmp_path / "vllm", SELECTS, "0.32.0+cpu"))
    context = replace(context, env={**context.env, "VLLM_LORA_RESOLVER_CACHE_DIR": str(adapter)})
    logged = list(at_start(Settings.from_env(context.env), context.env, base_rows_get_an_adapter=True))
    assert [item.check for item in logged] == ["filesystem", "runtime", "kernels"]
    said = [(item.check, item.found, item.remedy) for item in examine(context)]
    assert [item for item in logged if (item.check, item.found, item.remedy) not in said] == []
