"""Replacing a builtin: with vLLM's real loader and the two real entry points, in both orders of discovery."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lora_plugins.plugin_names import EVERYTHING
from testbed.forking_vllm import run_forked

NAME = "lora_filesystem_resolver"
ORDERS = ["ours first", "ours last"]
BUILTIN = {"Filesystem Resolver": "vllm.plugins.lora_resolvers.filesystem_resolver.FilesystemResolver"}
OURS = {"lora-plugins": "lora_plugins.vllm_patches.api_server.lora_resolver.LoRAPluginsResolver"}

# "ROOT" stands for a directory that exists.
ENVIRONMENTS = {
    "named": {"VLLM_PLUGINS": NAME, "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "named among others": {"VLLM_PLUGINS": f"x,{NAME}", "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "named beside a misspelt one": {
        "VLLM_PLUGINS": f"lora_s3_resolvr,{NAME}",
        "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT",
    },
    "a variable misspelt": {"VLLM_PLUGINS": NAME, "VLLM_LORA_RESOLVER_CACHE_DIRECTORY": "ROOT"},
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
    "twice": {"VLLM_PLUGINS": f"{NAME},lora_lru_managr", "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
}
HUB, S3 = "lora_hf_hub_resolver", "lora_s3_resolver"
HUB_REPOS = {"VLLM_LORA_RESOLVER_HF_REPO_LIST": "org/repo,other/*"}
S3_TEMPLATE = {"S3_PATH_TEMPLATE": "s3://bucket/{lora_name}"}
REMOTE = {
    "hub": {"VLLM_PLUGINS": HUB, **HUB_REPOS},
    "hub, all": HUB_REPOS,
    "hub, others": {"VLLM_PLUGINS": NAME, **HUB_REPOS},
    "hub, unset": {"VLLM_PLUGINS": HUB},
    "hub, wrong": {"VLLM_PLUGINS": HUB, "VLLM_LORA_RESOLVER_HF_REPO_LIST": "org"},
    "s3": {"VLLM_PLUGINS": S3, **S3_TEMPLATE},
    "s3, all": S3_TEMPLATE,
    "s3, unset": {"VLLM_PLUGINS": S3},
    "s3, wrong": {"VLLM_PLUGINS": S3, "S3_PATH_TEMPLATE": "s3://bucket/{lora}"},
}
ALL_THREE = f"{HUB},{S3},{NAME}"
EVERYWHERE = {"VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT", **HUB_REPOS, **S3_TEMPLATE}
SEVERAL = {
    "several": {"VLLM_PLUGINS": ALL_THREE, **EVERYWHERE},
    "several, ordered": {"VLLM_PLUGINS": ALL_THREE, **EVERYWHERE, "LORA_PLUGINS_SOURCES": "hub,filesystem"},
    "several, two set": {"VLLM_PLUGINS": ALL_THREE, **HUB_REPOS, "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "several, two named": {"VLLM_PLUGINS": f"{S3},{NAME}", **EVERYWHERE},
    "several, none named": EVERYWHERE,
}
ALL_IN_ONE = {
    "everything": {"VLLM_PLUGINS": EVERYTHING, "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "everything, all set": {"VLLM_PLUGINS": f"x,{EVERYTHING}", **EVERYWHERE},
    "everything, nothing set": {"VLLM_PLUGINS": EVERYTHING},
    "everything, not named": EVERYWHERE,
    "everything, and one": {"VLLM_PLUGINS": f"{EVERYTHING},lora_admin", "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
    "everything, misspelt": {"VLLM_PLUGINS": "lora-plugins", "VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT"},
}
NEWER = "0.34.0"
ALL_PLUGINS = (NAME, HUB, S3, "lora_lru_manager", "lora_kernels", "lora_admin")
ANOTHER_VLLM = {f"{name}, another vLLM": {"VLLM_PLUGINS": name, **EVERYWHERE} for name in ALL_PLUGINS}
ANOTHER_VLLM["another vLLM, not named"] = EVERYWHERE
ANOTHER_VLLM["another vLLM, tried"] = {"VLLM_PLUGINS": NAME, **EVERYWHERE, "LORA_PLUGINS_UNTESTED_VLLM": "1"}
SOURCES_OF = {name: HUB if name.startswith("hub") else S3 for name in REMOTE} | dict.fromkeys(SEVERAL, ALL_THREE)
SOURCES_OF |= {f"{name}, another vLLM": name for name in ALL_PLUGINS}
SOURCES_OF |= dict.fromkeys(ALL_IN_ONE, EVERYTHING)
ENVIRONMENTS |= REMOTE | SEVERAL | ALL_IN_ONE | ANOTHER_VLLM
# The order of discovery counts where one alone may take a builtin's place.
IN_ONE_ORDER = {*SEVERAL, *ALL_IN_ONE, *ANOTHER_VLLM}
CASES = [(name, order) for name in ENVIRONMENTS for order in ORDERS[: 1 if name in IN_ONE_ORDER else 2]]
both_orders = pytest.mark.parametrize("order", ORDERS)


def in_orders(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("env", "order"), [case for case in CASES if case[0] in names])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    (root / "file").write_bytes(b"")
    metadata = root / "another" / f"vllm-{NEWER}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Name: vllm\nVersion: {NEWER}\n")
    return root


@pytest.fixture(scope="module")
def outcomes(root):
    """Environment and order to the outcome; all forked from one process, because importing vLLM takes long."""
    lines = [
        json.dumps(
            {
                "name": SOURCES_OF.get(name, NAME),
                "env": {
                    "XDG_CACHE_HOME": str(root / "cache"),
                    **{key: text.replace("ROOT", str(root)) for key, text in ENVIRONMENTS[name].items()},
                },
                "order": order,
                "times": 2 if name == "twice" else 1,
                "vllm": str(root / "another") if name in ANOTHER_VLLM else "",
            }
        )
        for name, order in CASES
    ]
    ours = ("VLLM_PLUGINS", "VLLM_LORA_RESOLVER_", "LORA_PLUGINS_")
    env = {key: text for key, text in os.environ.items() if not key.startswith(ours)}
    (root / "scenarios").write_text("\n".join(lines))
    home = root / "forked"
    home.mkdir()
    done = run_forked(
        "tests.plugin_scenarios:main", ["plugin_scenarios", str(root / "scenarios")], environment=env, home=home
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(CASES), done.stderr[-4000:]
    return dict(zip(CASES, results, strict=True))


NOBODY: dict[str, str] = {}
WANTED = {  # what is registered afterwards, and the labels of our sources
    "named": (OURS, ["filesystem"]),
    "named among others": (OURS, ["filesystem"]),
    "named beside a misspelt one": (OURS, ["filesystem"]),
    "twice": (OURS, ["filesystem"]),
    "another vLLM, tried": (OURS, ["filesystem"]),
    "hub": (OURS, ["hub"]),
    "s3": (OURS, ["s3"]),
    "several": (OURS, ["filesystem", "s3", "hub"]),
    "several, ordered": (OURS, ["hub", "filesystem", "s3"]),  # the one left out is asked last
    "several, two set": (OURS, ["filesystem", "hub"]),
    "several, two named": (OURS, ["filesystem", "s3"]),
    "everything": (OURS, ["filesystem"]),
    "everything, all set": (OURS, ["filesystem", "s3", "hub"]),
    "everything, nothing set": (OURS, []),  # adapters come from URIs
    **dict.fromkeys(("everything, not named", "everything, misspelt"), (NOBODY, None)),
    **dict.fromkeys(("all", "all, misspelled", "several, none named", "another vLLM, not named"), (BUILTIN, None)),
    **dict.fromkeys(("all, unset", "others", "none", "named, unset", "named, empty"), (NOBODY, None)),
    "a variable misspelt": (NOBODY, None),
    # vLLM's own Hub resolver registers only where it is named, too.
    **dict.fromkeys(("hub, all", "hub, others", "hub, unset", "s3, all", "s3, unset"), (NOBODY, None)),
}
ERRORS = {
    "named, missing": "which is no directory",
    "named, a file": "which is no directory",
    "named, misspelled": "LORA_PLUGINS_TYPO",
    "hub, wrong": "VLLM_LORA_RESOLVER_HF_REPO_LIST",
    "s3, wrong": "S3_PATH_TEMPLATE",
    "everything, and one": "leave lora_admin out",
    **{f"{name}, another vLLM": "LORA_PLUGINS_UNTESTED_VLLM=1 tries this one" for name in ALL_PLUGINS},
}
WARNED = {
    "named beside a misspelt one": ("'lora_s3_resolvr'", "lora_s3_resolver"),
    "twice": ("'lora_lru_managr'", "lora_lru_manager"),
}


@in_orders(*WANTED)
def test_named_plugins_alone_replace_the_builtin(outcomes, order, env, root):
    registered, sources = WANTED[env]
    outcome = outcomes[env, order]
    assert "error" not in outcome
    assert outcome["registered"] == registered
    if sources is None:
        assert outcome["untouched"], "vLLM is as it was"
        return
    assert outcome["are_resolvers"]
    assert [source.partition(" ")[0] for source in outcome["sources"]] == sources
    assert (f"filesystem ({root})" in outcome["sources"]) == ("filesystem" in sources)
    assert outcome["wrapped_once"]


@in_orders(*ERRORS)
def test_startup_fails_on_a_wrong_setting_or_unknown_vllm(outcomes, order, env):
    outcome = outcomes[env, order]
    assert outcome["error"].startswith("InvalidSettings: [L007]")
    assert ERRORS[env] in outcome["error"]
    assert outcome["registered"] == {}
    assert outcome["untouched"]


@in_orders("named among others", *WARNED)
def test_misspelt_plugin_name_is_warned_of_once(outcomes, order, env):
    said = "VLLM_PLUGINS names {}, and no installed package has such a plugin; did you mean {}?"
    assert outcomes[env, order]["warned"] == ([said.format(*WARNED[env])] if env in WARNED else [])


@both_orders
def test_a_misspelt_variable_is_warned_of_once(outcomes, order):
    first, *more = outcomes["a variable misspelt", order]["warned"]
    assert "did you mean VLLM_LORA_RESOLVER_CACHE_DIR?" in first
    assert not any("did you mean" in text for text in more)


def test_every_environment_has_an_outcome_above():
    assert {*WANTED} | {*ERRORS} == {*ENVIRONMENTS}
