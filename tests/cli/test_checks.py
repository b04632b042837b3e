"""The doctor on environments that are broken in one way each, and what it says of them."""

from __future__ import annotations

import base64
import hashlib
import sys
from dataclasses import replace

import pytest

from lora_plugins.cli import Exit
from lora_plugins.cli.doctor import CHECKS
from lora_plugins.cli.doctor_context import Context
from lora_plugins.findings import State, Step, discovered_plugins
from lora_plugins.settings import OWN_VARIABLES
from lora_plugins.vllm_patches.vllm_sources import installed
from testbed.hub import local_hub
from testbed.s3 import s3_server
from tests.cli.common import Cli, Done, outside
from tests.make import adapter_files, put

S3 = {"VLLM_PLUGINS": "lora_s3_resolver", "S3_PATH_TEMPLATE": "s3://adapters/{lora_name}"}
NOBODY = "http://127.0.0.1:1"  # below 1024, so given to nobody
KEYS = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


def examined(cli: Cli, *arguments: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Exit code, and the findings by what was checked."""
    done = cli("doctor", "--json", "--timeout", "60", *arguments)
    done.assert_no_traceback()
    assert done.err == ""
    answer = done.json
    assert answer["healthy"] == (done.code == 0) == (answer["problems"] == 0)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in answer["findings"]:
        assert set(finding) == {"check", "state", "found", "remedy"}
        found.setdefault(finding["check"], []).append(finding)
    return done.code, found


def examined_with(cli: Cli, env: dict[str, str]) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """With more variables, and without a network."""
    before = dict(cli.env)
    cli.env |= env
    try:
        return examined(cli, "--no-network")
    finally:
        cli.env = before


def of_hub(done: Done) -> list[dict[str, str]]:
    return [item for item in done.json["findings"] if item["check"] == "hub"]


# What is changed ("ROOT" stands for a directory, None unsets), where it shows, as what, what is said, what to do.
BROKEN = {
    "root missing": (
        {"VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT/missing"},
        "filesystem", "problem", "ROOT/missing', which is no directory", "create it",
    ),
    "root empty": (
        {"VLLM_LORA_RESOLVER_CACHE_DIR": "ROOT/empty"},
        "filesystem", "warning", "has no adapter", "<team>/<name>/",
    ),
    "root unset": (
        {"VLLM_LORA_RESOLVER_CACHE_DIR": None},
        "filesystem", "problem", "but VLLM_LORA_RESOLVER_CACHE_DIR is unset: it serves nothing", "set VLLM_LORA",
    ),
    "plugins unset": (
        {"VLLM_PLUGINS": None},
        "filesystem", "warning", "VLLM_PLUGINS is unset; vLLM's builtin of this name runs instead",
        "add lora_filesystem_resolver to VLLM_PLUGINS",
    ),
    "plugin misspelt": (
        {"VLLM_PLUGINS": "lora_filesytem_resolver"},
        "plugins", "problem", "no installed package has such a plugin", "did you mean lora_filesystem_resolver?",
    ),
    "plugin with a space": (
        {"VLLM_PLUGINS": "lora_kernels, lora_filesystem_resolver"},
        "plugins", "problem", "vLLM does not leave out the space", "commas alone",
    ),
    "not asked": (
        {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": None},
        "runtime", "problem", "VLLM_ALLOW_RUNTIME_LORA_UPDATING is not 1", "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    ),
    "variable misspelt": (
        {"LORA_PLUGINS_STORE_MAXBYTES": "1GB"},
        "settings", "problem", "unknown variable LORA_PLUGINS_STORE_MAXBYTES: startup fails",
        "did you mean LORA_PLUGINS_STORE_MAX_BYTES?",
    ),
    "variable almost ours": (
        {"LORA_PLUGIN_STORE_DIR": "/x"},
        "settings", "warning", "LORA_PLUGIN_STORE_DIR is set, and nothing reads it", "did you mean LORA_PLUGINS_STORE",
    ),
    "policy missing": (
        {"LORA_PLUGINS_POLICY": "ROOT/policy.toml"},
        "settings", "problem", "policy.toml'; expected a file that exists", "correct or unset LORA_PLUGINS_POLICY",
    ),
    "policy missing, so not read": (
        {"LORA_PLUGINS_POLICY": "ROOT/policy.toml"},
        "policy", "warning", "not checked: LORA_PLUGINS_POLICY is wrong", "",
    ),
    "policy no TOML": (
        {"LORA_PLUGINS_POLICY": "ROOT/file", "VLLM_PLUGINS": "lora_lru_manager,lora_admin"},
        "policy", "problem", "TOML", "",
    ),
    "adapters file wrong": (
        {"LORA_PLUGINS_ADAPTERS_FILE": "ROOT/adapters.yaml", "VLLM_PLUGINS": "lora_lru_manager,lora_admin"},
        "adapters", "problem", "entry 1, prelod: not known, did you mean 'preload'?", "correct the file",
    ),
    "adapters file without admin": (
        {"LORA_PLUGINS_ADAPTERS_FILE": "ROOT/none.yaml"},
        "admin", "warning", "off: LORA_PLUGINS_ADAPTERS_FILE is set, but", "add lora_admin",
    ),
    "kernels not here": (
        {"VLLM_PLUGINS": "lora_kernels", "LORA_PLUGINS_KERNELS": "triton"},
        "kernels", "problem", "LORA_PLUGINS_KERNELS=triton, but the platform is cpu", "choose auto",
    ),
    "store a file": (
        {"LORA_PLUGINS_STORE_DIR": "ROOT/file"},
        "store", "problem", "ROOT/file is in the way of the store", "set LORA_PLUGINS_STORE_DIR",
    ),
    "budget larger than the disk": (
        {"LORA_PLUGINS_STORE_MAX_BYTES": "900000GB"},
        "store", "warning", "the disk is full before the budget is", "lower LORA_PLUGINS_STORE_MAX_BYTES",
    ),
    "s3 without a template": (
        {"VLLM_PLUGINS": "lora_s3_resolver"},
        "s3", "problem", "but S3_PATH_TEMPLATE is unset", "set S3_PATH_TEMPLATE",
    ),
    "s3 with a password in its endpoint": (
        {**S3, **KEYS, "AWS_ENDPOINT_URL": "https://me:secret@host"},
        "s3", "problem", "credentials in AWS_ENDPOINT_URL", "set AWS_ACCESS_KEY_ID",
    ),
    "s3 not there": (
        {**S3, **KEYS, "AWS_ENDPOINT_URL": NOBODY, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "eu-central-1"},
        "s3", "problem", "an object store that cannot be reached", "check the network and the endpoint",
    ),
    "one of several sources set": (
        {"VLLM_PLUGINS": "lora_filesystem_resolver,lora_s3_resolver"},
        "s3", "off", "but S3_PATH_TEMPLATE is unset: it serves nothing", "",
    ),
    "hub list empty": (
        {"VLLM_PLUGINS": "lora_hf_hub_resolver"},
        "hub", "problem", "but VLLM_LORA_RESOLVER_HF_REPO_LIST is unset", "set VLLM_LORA_RESOLVER_HF_REPO_LIST",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_environment(cli, kind):
    changes, check, state, says, remedy = BROKEN[kind]
    (cli.root / "empty").mkdir()
    (cli.root / "file").write_text("no = TOML = here")
    (cli.root / "none.yaml").write_text("adapters: []")
    (cli.root / "adapters.yaml").write_text("adapters: [{name: sql, prelod: true}]")
    for name, value in changes.items():
        if value is None:
            del cli.env[name]
        else:
            cli.env[name] = value.replace("ROOT", str(cli.root))
    code, found = examined(cli)
    (finding,) = [item for item in found[check] if says.replace("ROOT", str(cli.root)) in item["found"]]
    assert finding["state"] == state
    assert remedy in finding["remedy"]
    assert code == (Exit.WRONG if state == "problem" or "not checked" in says else Exit.OK)
    assert "secret" not in str(found)


def test_every_wrong_variable_is_named_not_only_the_first(cli):
    cli.env |= {"LORA_PLUGINS_KERNELS": "gpu", "LORA_PLUGINS_STORE_MAX_BYTES": "lots", "LORA_PLUGINS_X": "1"}
    _, found = examined(cli)
    assert [item["state"] for item in found["settings"]] == ["problem"] * 3
    assert "budget not checked" in found["store"][0]["found"]
    assert found["store"][0]["state"] == "ok"  # the rest is looked at all the same


def test_no_value_of_a_variable_ends_the_doctor(cli):
    names = sorted(OWN_VARIABLES - {"LORA_PLUGINS_STORE_DIR"})
    for some in (names[::2], names[1::2], names):
        code, found = examined_with(cli, dict.fromkeys(some, "\x01nonsense"))
        assert code in (Exit.OK, Exit.WRONG), some
        assert len(found) == 12 + ("LORA_PLUGINS_ADAPTERS_FILE" in some), some


def test_a_healthy_environment(cli):
    cli.env["VLLM_PLUGINS"] = "lora_filesystem_resolver,lora_lru_manager,lora_kernels"
    code, found = examined(cli)
    assert code == Exit.OK
    states = {check: item["state"] for check, (item,) in found.items()}
    assert states == {
        **dict.fromkeys(("vllm", "settings", "plugins", "store"), "ok"),
        **dict.fromkeys(("filesystem", "runtime", "manager", "kernels"), "on"),
        **dict.fromkeys(("s3", "hub", "admin", "policy"), "off"),
    }
    assert found["filesystem"][0]["found"] == f"filesystem ({cli.adapters}): 3 adapters"
    assert not cli.store.exists()  # looking changes nothing


def test_an_empty_environment_is_no_problem(cli):
    cli.env = {}
    code, found = examined(cli)
    assert code == Exit.OK
    assert {items[0]["state"] for check, items in found.items() if check in ("filesystem", "s3", "hub", "runtime")} == {
        "off"
    }


def test_variables_of_libraries_are_named_without_values(cli):
    names = ["AWS_ENDPOINT_URL", "AWS_REGION", "HF_HUB_OFFLINE", "HF_TOKEN", "VLLM_API_KEY"]
    cli.env = dict.fromkeys(names, "hunter2")
    assert examined(cli)[1]["settings"][0]["found"] == ", ".join(names)


@pytest.mark.usefixtures("permissions_count")
def test_what_may_not_be_read_or_written(cli):
    policy = cli.root / "policy.toml"
    policy.write_text("")
    cli.env |= {
        "LORA_PLUGINS_POLICY": str(policy),
        "VLLM_PLUGINS": "lora_filesystem_resolver,lora_lru_manager,lora_admin",
    }
    cli.store.mkdir()
    for path in (policy, cli.adapters):
        path.chmod(0)
    cli.store.chmod(0o555)
    try:
        code, found = examined(cli)
    finally:
        cli.adapters.chmod(0o755)
        cli.store.chmod(0o755)
    assert code == Exit.WRONG
    for check, said in (
        ("filesystem", f"this user may not read {cli.adapters}: Permission denied"),
        ("store", f"{cli.store} cannot be written: Permission denied"),
    ):
        assert [(item["state"], item["found"]) for item in found[check]] == [("problem", said)]
    (finding,) = found["policy"]
    assert finding["state"] == "problem"
    assert "Permission denied" in finding["found"]


@pytest.mark.usefixtures("permissions_count")
def test_folders_and_weights_that_may_not_be_read(cli):
    denied = (cli.adapters / "team", cli.adapters / "sql" / "adapter_model.safetensors")
    put(cli.adapters / "lost+found", adapter_files()).chmod(0)
    for path in denied:
        path.chmod(0)
    code, found = examined(cli)
    denied[0].chmod(0o755)
    states = [(item["state"], item["found"]) for item in found["filesystem"]]
    assert (code, states[1:]) == (Exit.WRONG, [("on", f"filesystem ({cli.adapters}): 1 adapter")])
    assert [str(path) in states[0][1] for path in denied] == [True, True]
    assert "lost+found" not in states[0][1]


def test_a_policy_that_can_be_read_and_by_whom(cli):
    policy = cli.root / "policy.toml"
    policy.write_text('[tenants.a]\nkeys = ["one", "two"]\nadapters = ["a/*"]\n')
    cli.env |= {"LORA_PLUGINS_POLICY": str(policy), "VLLM_PLUGINS": "lora_lru_manager,lora_admin"}
    for mode, state in ((0o640, "on"), (0o644, "warning")):
        policy.chmod(mode)
        _, found = examined(cli)
        assert found["policy"][0]["state"] == state
        assert "2 keys of 1 tenant" in found["policy"][0]["found"]


def test_the_doctor_shows_no_key_of_a_url(cli):
    cli.env.update(S3, S3_PATH_TEMPLATE="ftp://hunter2@mirror/{lora_name}", HF_ENDPOINT="http://hunter2@127.0.0.1:9")
    for arguments in (("doctor", "--no-network"), ("doctor", "--json"), ("doctor", "--timeout", "1")):
        done = cli(*arguments)
        assert "hunter2" not in done.out + done.err


def test_s3_without_its_extra(cli, monkeypatch):
    for package in ("s3fs", "awscrt"):
        monkeypatch.setitem(sys.modules, package, None)
    cli.env |= S3
    code, found = examined(cli)
    (finding,) = found["s3"]
    assert (code, finding["state"]) == (Exit.WRONG, "problem")
    assert finding["remedy"].startswith('pip install "lora-plugins[s3] @ git+$REPOSITORY", where REPOSITORY is')


def test_existing_missing_and_denied_buckets(cli):
    with s3_server() as s3:
        s3.bucket("adapters").put_many("sql", adapter_files())
        cli.env |= {**S3, **s3.env()}
        code, found = examined(cli)
        assert (code, found["s3"][0]["state"]) == (Exit.OK, "on")
        assert found["s3"][0]["found"] == "s3 (s3://adapters/{lora_name}): 1 adapter"
        cli.env["S3_PATH_TEMPLATE"] = "s3://nowhere/{lora_name}"
        code, found = examined(cli)
        assert (code, found["s3"][0]["state"]) == (Exit.WRONG, "problem")
        assert "no such bucket" in found["s3"][0]["found"]
        _, found = examined(cli, "--no-network")
        assert found["s3"][0] == {
            "check": "s3", "state": "on", "found": "s3 (s3://nowhere/{lora_name}) (not asked)", "remedy": "",
        }  # fmt: skip


def test_the_hub_answers_denies_or_is_not_there(cli):
    repos = "acme/sql,acme/folders,acme/secret,other/*"
    base = {**cli.env, "VLLM_PLUGINS": "lora_hf_hub_resolver", "VLLM_LORA_RESOLVER_HF_REPO_LIST": repos}
    with local_hub() as hub:
        hub.commit("acme/sql", adapter_files())
        hub.commit("acme/folders", {f"en/{name}": data for name, data in adapter_files().items()})
        hub.commit("acme/secret", adapter_files())
        hub.private("acme/secret", tokens=["hf_reader"])
        found = of_hub(outside("doctor", "--json", env={**base, **hub.env(cli.root / "home")}))
        assert [item["state"] for item in found] == ["problem", "on"]
        assert "missing or private, acme/secret@main" in found[0]["found"]
        assert "HF_TOKEN" in found[0]["remedy"]
        assert "2 adapters" in found[1]["found"]
        env = {**base, **hub.env(cli.root / "home", token="hf_reader")}
        assert outside("doctor", "--json", env=env).code == Exit.OK
        gone = hub.env(cli.root / "home", url=NOBODY)
    done = outside("doctor", "--json", "--timeout", "60", env={**base, **gone})
    done.assert_no_traceback()
    assert (done.code, {item["state"] for item in of_hub(done)}) == (Exit.WRONG, {"problem"})
    assert all("Hub" in item["found"] for item in of_hub(done))
    done = outside("doctor", "--json", env={**base, **gone, "HF_HUB_OFFLINE": "1"})
    (found,) = of_hub(done)
    assert (done.code, "offline: only what the Hub's cache has" in found["found"]) == (Exit.OK, True)


# --- what is installed


def around(*names: str) -> Context:
    env = {"VLLM_PLUGINS": ",".join(names)}
    discovered = {**discovered_plugins(), "lora_admin": ["lora_plugins.endpoint_plugin:endpoint_plugin"]}
    return Context(env, discovered, installed(), network=False, timeout_s=1)


def verdict(surroundings: Context, check: str) -> Step:
    (finding,) = CHECKS[check](surroundings)
    return finding


def test_the_admin_plugin_needs_the_manager():
    finding = verdict(around("lora_admin"), "admin")
    assert finding.state is State.PROBLEM
    assert finding.found == "VLLM_PLUGINS names lora_admin, which needs lora_lru_manager; VLLM_PLUGINS does not name it"
    assert verdict(around("lora_admin", "lora_lru_manager"), "admin").state is State.ON


@pytest.mark.parametrize("plugin", ["lora_s3_resolver", "lora_lru_manager", "lora_kernels", "lora_admin"])
def test_an_entry_point_that_is_not_installed(plugin):
    there = around(plugin, "lora_lru_manager")
    missing = {name: values for name, values in there.discovered.items() if name != plugin}
    check = plugin.split("_")[1].replace("lru", "manager")
    finding = verdict(replace(there, discovered=missing), check)
    assert (finding.state, "its entry point is not installed" in finding.found) == (State.PROBLEM, True)


def test_a_builtin_of_the_same_name_is_not_ours():
    there = around("lora_hf_hub_resolver")
    only_vllm = {**there.discovered, "lora_hf_hub_resolver": ["vllm.plugins.x:register"]}
    finding = verdict(replace(there, discovered=only_vllm), "hub")
    assert "its entry point is not installed" in finding.found


@pytest.mark.parametrize(
    ("number", "state"), [("0.29.1", "problem"), ("0.30.0", "ok"), ("0.32.5+cu130", "ok"), ("0.34.0", "problem")]
)
def test_vllm_in_and_out_of_range(tmp_path, number, state):
    metadata = tmp_path / f"vllm-{number}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Name: vllm\nVersion: {number}\n")
    finding = verdict(replace(around(), vllm=tmp_path), "vllm")
    assert (finding.state, number in finding.found) == (state, True)


def test_a_vllm_that_somebody_changed(tmp_path):
    module = put(tmp_path / "vllm" / "lora", {"resolver.py": b"def resolve_lora(): ...\n"}) / "resolver.py"
    digest = base64.urlsafe_b64encode(hashlib.sha256(module.read_bytes()).digest()).decode().rstrip("=")
    record = f"vllm/lora/resolver.py,sha256={digest},24\nvllm/_version.py,,\nvllm-0.32.0.dist-info/RECORD,,\n"
    put(tmp_path / "vllm-0.32.0.dist-info", {"METADATA": b"Name: vllm\nVersion: 0.32.0\n", "RECORD": record.encode()})
    there = replace(around(), vllm=tmp_path)
    assert verdict(there, "vllm").state is State.OK
    for change in (lambda: module.write_text("def resolve_lora(self): ...\n"), module.unlink):
        change()
        finding = verdict(there, "vllm")
        assert finding.state is State.WARNING
        assert finding.found == "vLLM 0.32.0, changed since its installation: vllm/lora/resolver.py"


def test_no_vllm():
    assert verdict(replace(around(), vllm=None), "vllm").state is State.PROBLEM
