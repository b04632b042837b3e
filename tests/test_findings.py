"""What is found in an environment, for the doctor and for a server's log."""

from __future__ import annotations

import pytest
from vllm.envs import environment_variables

from lora_plugins.findings import misspelt_variables, resolvers_not_asked, unknown_plugins
from lora_plugins.plugin_names import MANAGER, OURS
from lora_plugins.settings import VARIABLES, Settings

LIST = f"correct or remove the name; lora-plugins has lora_plugins, or {', '.join(OURS)}"
INSTALLED = ("lora_admin", "lora_kernels", "lora_filesystem_resolver", "lora_s3_resolver", "oot")


@pytest.mark.parametrize(
    ("named", "remedies"),
    [
        ("lora_filesystm_resolver,lora_admin", ["did you mean lora_filesystem_resolver?"]),
        ("lora_admin, lora_kernels", ["separate the names by commas alone"]),
        ("LORA_S3_RESOLVER", ["did you mean lora_s3_resolver?"]),
        ("lora_s3_resolver,oot,,dummy,acme_kernels,acme_admin,acme_lora", []),
        ("lora_s3,s3", ["did you mean lora_s3_resolver?"] * 2),
        ("lora_hub,lora_hf,hf_hub", ["did you mean lora_hf_hub_resolver?"] * 3),
        ("lora_fs_resolver,filesystem", ["did you mean lora_filesystem_resolver?"] * 2),
        ("lora_sources_resolver,lra_sources", ["did you mean lora_sources?"] * 2),
        ("kernels,lora-kernel,lora_manager", [f"did you mean {name}?" for name in ("lora_kernels",) * 2 + (MANAGER,)]),
        ("lora_resolver,lora_,resolver", [LIST] * 3),
        ("lora-plugins,lora_plugin,LoRA_Plugins", ["did you mean lora_plugins?"] * 3),
    ],
)
def test_names_that_look_like_ours_are_found(named, remedies):
    found = list(unknown_plugins({"VLLM_PLUGINS": named}, INSTALLED, only_ours=True))
    assert [finding.remedy for finding in found] == remedies
    assert not list(unknown_plugins({}, INSTALLED))


def test_the_doctor_names_every_plugin_that_is_not_installed():
    found = list(unknown_plugins({"VLLM_PLUGINS": "dummy,ooot,lora_admin"}, INSTALLED))
    assert [str(finding) for finding in found] == [
        "VLLM_PLUGINS names 'dummy', and no installed package has such a plugin; correct or remove the name",
        "VLLM_PLUGINS names 'ooot', and no installed package has such a plugin; did you mean oot?",
    ]


def test_resolvers_that_are_not_asked_are_a_problem():
    (finding,) = resolvers_not_asked(Settings())
    assert str(finding) == (
        "vLLM asks no resolver: VLLM_ALLOW_RUNTIME_LORA_UPDATING is not 1; set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    )
    assert not list(resolvers_not_asked(Settings(runtime_lora_updating=True)))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LORA_PLUGIN_STORE_DIR", "LORA_PLUGINS_STORE_DIR"),
        ("lora_plugins_store_dir", "LORA_PLUGINS_STORE_DIR"),
        ("VLLM_LORA_RESOLVER_CACHE_DIRECTORY", "VLLM_LORA_RESOLVER_CACHE_DIR"),
        ("VLLM_LORA_RESOLVER_HF_REPOS_LIST", "VLLM_LORA_RESOLVER_HF_REPO_LIST"),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ("VLLM_PLUGIN", "VLLM_PLUGINS"),
        ("S3_PATH_TEMPLATES", "S3_PATH_TEMPLATE"),
    ],
)
def test_a_variable_almost_ours_is_named(name, meant):
    (found,) = misspelt_variables({name: "x", "HOME": "/root"})
    assert str(found) == f"{name} is set, and nothing reads it; did you mean {meant}?"


def test_variables_of_others_are_not_misspelt():
    others = ["PATH", "LORA_PLUGINS_PORT", "LORA_PLUGIN_SERVICE_HOST", "LORA_PLUGIN_PORT", "AWS_PROFILE", *VARIABLES]
    assert not list(misspelt_variables(dict.fromkeys([*others, *environment_variables], "x")))
