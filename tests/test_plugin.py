"""Taking the name: with vLLM's real loader and the two real entry points, in both orders of discovery."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAME = "lora_filesystem_resolver"
ORDERS = ["ours first", "ours last"]
BUILTIN = {"Filesystem Resolver": "vllm.plugins.lora_resolvers.filesystem_resolver.FilesystemResolver"}
OURS = {"lora-plugins": "lora_plugins.engine.LoRAPluginsResolver"}

# "ROOT" stands for a directory that exists.
ENVIRONMENTS = {
    "named": {"VLLM_PLUGINS": NAME, "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "named among others": {"VLLM_PLUGINS": f"x,{NAME}", "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "all": {"VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "all, unset": {},
    "all, misspelled": {"VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT", "LORA_PLUGINS_TYPO": "1"},
    "others": {"VLLM_PLUGINS": "lora_hf_hub_resolver", "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "none": {"VLLM_PLUGINS": "", "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "named, unset": {"VLLM_PLUGINS": NAME},
    "named, empty": {"VLLM_PLUGINS": NAME, "VLLM_LORA_RESOLVER_CACHE_DIR": ""},
    "named, missing": {"VLLM_PLUGINS": NAME, "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT/missing"},
    "named, a file": {"VLLM_PLUGINS": NAME, "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT/file"},
    "named, misspelled": {
        "VLLM_PLUGINS": NAME,
        "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT",
        "LORA_PLUGINS_TYPO": "1",
    },
    "twice": {"VLLM_PLUGINS": NAME, "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
}
both_orders = pytest.mark.parametrize("order", ORDERS)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    (root / "file").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def outcomes(root):
    """Environment and order to what it came to; all in one process, because importing vLLM takes long."""
    cases = list(itertools.product(ENVIRONMENTS, ORDERS))
    lines = [
        json.dumps(
            {
                "env": {key: text.replace("ROOT", str(root)) for key, text in ENVIRONMENTS[name].items()},
                "order": order,
                "times": 2 if name == "twice" else 1,
            }
        )
        for name, order in cases
    ]
    ours = ("VLLM_PLUGINS", "VLLM_LORA_RESOLVER_", "LORA_PLUGINS_")
    env = {key: text for key, text in os.environ.items() if not key.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugin_scenarios"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=Path(__file__).parent.parent,
        env=env,
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(cases), done.stderr[-4000:]
    return dict(zip(cases, results, strict=True))


@both_orders
@pytest.mark.parametrize("env", ["named", "named among others"])
def test_where_it_is_named_ours_runs_and_the_builtin_does_not(outcomes, order, env, root):
    outcome = outcomes[env, order]
    assert "error" not in outcome
    assert outcome["registered"] == OURS
    assert outcome["are_resolvers"]
    assert outcome["sources"] == [f"filesystem ({root})"]
    assert outcome["wrapped_once"]


@both_orders
@pytest.mark.parametrize("env", ["all", "all, misspelled"])
def test_where_all_plugins_load_the_builtin_runs_as_without_us(outcomes, order, env):
    outcome = outcomes[env, order]
    assert "error" not in outcome
    assert outcome["registered"] == BUILTIN
    assert outcome["untouched"]


@both_orders
@pytest.mark.parametrize("env", ["all, unset", "others", "none"])
def test_where_it_is_not_asked_for_nothing_is_registered_and_vllm_is_untouched(outcomes, order, env):
    outcome = outcomes[env, order]
    assert "error" not in outcome
    assert outcome["registered"] == {}
    assert outcome["untouched"]


@both_orders
@pytest.mark.parametrize("env", ["named, unset", "named, empty"])
def test_without_its_directory_nothing_is_registered(outcomes, order, env):
    outcome = outcomes[env, order]
    assert "error" not in outcome
    assert outcome["registered"] == {}
    assert outcome["untouched"]


@both_orders
@pytest.mark.parametrize(
    ("env", "says"),
    [
        ("named, missing", "which is no directory"),
        ("named, a file", "which is no directory"),
        ("named, misspelled", "LORA_PLUGINS_TYPO"),
    ],
)
def test_a_wrong_setting_stops_the_start(outcomes, order, env, says):
    outcome = outcomes[env, order]
    assert outcome["error"].startswith("InvalidSettings: [L007]")
    assert says in outcome["error"]
    assert outcome["registered"] == {}
    assert outcome["untouched"]


@both_orders
def test_registering_twice_changes_nothing(outcomes, order, root):
    outcome = outcomes["twice", order]
    assert outcome["registered"] == OURS
    assert outcome["sources"] == [f"filesystem ({root})"]
    assert outcome["wrapped_once"]
