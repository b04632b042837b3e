"""Settings: each variable with right and wrong values; a misspelled one is an error."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lora_plugins
from lora_plugins.cli import Exit
from lora_plugins.errors import InvalidSettings
from lora_plugins.settings import (
    HOST_POLICIES,
    OWN_VARIABLES,
    SOURCE_LABELS,
    VARIABLES,
    AdapterChat,
    BaseMatch,
    Kernels,
    Settings,
    named_in_environment,
)
from tools import write_settings_doc

DEFAULT_STORE = Path("~/.cache/lora-plugins").expanduser()
_BOOLEANS = {"1": True, "true": True, "On": True, "0": False, "no": False, "FALSE": False}
# Of each variable its field, and values by the texts that they are read from.
VALID: dict[str, tuple[str, dict[str, object]]] = {
    "LORA_PLUGINS_ADAPTER_FIELDS": ("adapter_fields", {"ignore": "ignore"}),
    "LORA_PLUGINS_ADAPTER_CHAT": (
        "adapter_chat",
        {"Base": AdapterChat.BASE, "strict": AdapterChat.STRICT, "tokens": AdapterChat.TOKENS},
    ),
    "LORA_PLUGINS_BASE_MATCH": (
        "base_match",
        {"strict": BaseMatch.STRICT, " Compatible ": BaseMatch.COMPATIBLE, "OFF": BaseMatch.OFF},
    ),
    "LORA_PLUGINS_BASE_ALIASES": ("base_aliases", {"org/a, b ,,c": ("org/a", "b", "c"), "": ()}),
    "LORA_PLUGINS_URL": ("url", {"http://server:9000": "http://server:9000"}),
    "LORA_PLUGINS_UNTESTED_VLLM": ("untested_vllm", _BOOLEANS),
    "LORA_PLUGINS_ALLOW_PICKLE": ("allow_pickle", _BOOLEANS),
    "LORA_PLUGINS_CHECK_FINITE": ("check_finite", {**_BOOLEANS, "": True}),
    "LORA_PLUGINS_CHECK_MD5": ("check_md5", _BOOLEANS),
    "LORA_PLUGINS_MAX_ADAPTER_BYTES": (
        "max_adapter_bytes",
        {"1": 1, "8GiB": 8 << 30, "500 mb": 500_000_000, "2kib": 2048},
    ),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": ("runtime_lora_updating", {"1": True, "True": True, "0": False}),
    "VLLM_LORA_RESOLVER_CACHE_DIR": ("filesystem_root", {"/srv/adapters": Path("/srv/adapters"), "": None}),
    "LORA_PLUGINS_ADAPTERS_FILE": ("adapters_file", {"/etc/hostname": Path("/etc/hostname")}),
    "LORA_PLUGINS_KERNELS": ("kernels", {" Reference ": Kernels.REFERENCE, "vllm": Kernels.VLLM}),
    "LORA_PLUGINS_STORE_DIR": ("store_dir", {"/var/lib/x": Path("/var/lib/x"), "": DEFAULT_STORE}),
    "XDG_CACHE_HOME": ("store_dir", {"": DEFAULT_STORE, "/var/cache": Path("/var/cache/lora-plugins")}),
    "LORA_PLUGINS_SOURCES": ("sources", {"": SOURCE_LABELS, "hub, s3": ("hub", "s3")}),
    "LORA_PLUGINS_ALLOWED_URIS": ("allowed_uris", {"": (), "s3://a/, hf://b": ("s3://a/", "hf://b")}),
    "LORA_PLUGINS_FETCH_TIMEOUT_S": ("fetch_timeout_s", {"86400": 86_400.0, "2.5": 2.5}),
    "LORA_PLUGINS_FETCH_MAX_S": ("fetch_max_s", {"900": 900.0}),
    "LORA_PLUGINS_REVALIDATE_S": ("revalidate_s", {" 1e3 ": 1000.0, "0": 0.0}),
    "LORA_PLUGINS_ABSENT_TTL_S": ("absent_ttl_s", {"0": 0.0}),
    "LORA_PLUGINS_STORE_MAX_BYTES": ("store_max_bytes", {"2GiB": 2 << 30}),
    "VLLM_USE_MODELSCOPE": ("use_modelscope", {"True": True}),
    "LORA_PLUGINS_LINK_ROOTS": ("link_roots", {"/pvc, /more/": (Path("/pvc"), Path("/more")), "/": (Path("/"),)}),
    "S3_PATH_TEMPLATE": ("s3_path_template", {"": None, "s3://b/{lora_name}": "s3://b/{lora_name}"}),
    "LOCAL_PATH_TEMPLATE": ("local_path_template", {"": None, "/x/{lora_name}": "/x/{lora_name}"}),
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": ("hub_repos", {"a/b,c/*": ("a/b", "c/*")}),
    "LORA_PLUGINS_HOST_MAX_BYTES": ("host_max_bytes", {"1.5MB": 1_500_000, "0.25 GiB": 1 << 28}),
    "LORA_PLUGINS_HOST_POLICY": (
        "host_policy",
        {**{name: name for name in HOST_POLICIES}, " LRFU ": "lrfu", "": "lru"},
    ),
    "LORA_PLUGINS_LOAD_INPLACE": ("load_inplace", {"Inflight": "inflight", "": "finish"}),
    "LORA_PLUGINS_LIST": ("list_models", {"All": "all", "": "served"}),
    "LORA_PLUGINS_UNMATCHED": ("unmatched", {"warn": "warn", "Refuse": "refuse", "": "refuse"}),
    "LORA_PLUGINS_PRELOAD": ("preload", {"sql, team/chat": ("sql", "team/chat")}),
    "LORA_PLUGINS_RESTORE": ("restore", {"yes": "1", "Living": "living"}),
    "LORA_PLUGINS_REPLICA": ("replica", {"lora-0": "lora-0", "": None}),
    "LORA_PLUGINS_REFRESH_S": ("refresh_s", {"0": 0.0, "2.5": 2.5}),
    "LORA_PLUGINS_DRAIN_TIMEOUT_S": ("drain_timeout_s", {"0": 0.0}),
    "LORA_PLUGINS_POLICY": ("policy", {"": None, __file__: Path(__file__)}),
    "LORA_PLUGINS_ADMIN_KEY": ("admin_key", {"k3y=/+~": "k3y=/+~"}),
    "LORA_PLUGINS_METRICS_ADAPTERS": (
        "metrics_adapters",
        {" 0 ": 0, "": 200, " All": float("inf"), __file__: Path(__file__)},
    ),
}
_NO_SECONDS = ("", "-1", "86401", "inf", "nan", "soon", "1,5")
_NO_BOOLEANS = ("2", "maybe", "-1", "1 0")
INVALID = {
    "LORA_PLUGINS_ADAPTER_FIELDS": ("no", "1"),
    "LORA_PLUGINS_ADAPTER_CHAT": ("", "strictly", "adapter,base"),
    "LORA_PLUGINS_BASE_MATCH": ("", "loose", "strict,off"),
    "LORA_PLUGINS_ALLOW_PICKLE": _NO_BOOLEANS,
    "LORA_PLUGINS_CHECK_FINITE": _NO_BOOLEANS,
    "LORA_PLUGINS_MAX_ADAPTER_BYTES": ("", "0", "-1", "8 PB", "1.5", "1.5B", "1,5GiB", "GiB", "9" * 40, "inf"),
    "LORA_PLUGINS_KERNELS": ("", "cuda", "cpu,triton"),
    "LORA_PLUGINS_STORE_MAX_BYTES": ("", "0", "-1", "much", "8 PB", "1.GiB", ".5GiB", "inf", "٣"),
    "LORA_PLUGINS_SOURCES": ("s3,s3", "ftp", "s3;hub", "S3", "filesystem,s3,hub,gcs"),
    "LORA_PLUGINS_FETCH_TIMEOUT_S": (*_NO_SECONDS, "0"),
    "LORA_PLUGINS_ABSENT_TTL_S": _NO_SECONDS,
    "LORA_PLUGINS_REVALIDATE_S": _NO_SECONDS,
    "LORA_PLUGINS_REFRESH_S": _NO_SECONDS,
    "LORA_PLUGINS_DRAIN_TIMEOUT_S": _NO_SECONDS,
    "LORA_PLUGINS_HOST_MAX_BYTES": ("", "0", "-1", "much"),
    "LORA_PLUGINS_HOST_POLICY": ("lru,lfu", "random", "none"),
    "LORA_PLUGINS_LOAD_INPLACE": ("1", "move"),
    "LORA_PLUGINS_LIST": ("1", "sources"),
    "LORA_PLUGINS_UNMATCHED": ("1", "off", "ignore"),
    "LORA_PLUGINS_RESTORE": ("2",),
    "LORA_PLUGINS_POLICY": ("/no/such/file", "/"),
    "LORA_PLUGINS_METRICS_ADAPTERS": ("-1", "many", "1000000", "1.5", "/no/such/file", "/"),
    "LORA_PLUGINS_STORE_DIR": ("~no-such-user-here/x",),
    "VLLM_LORA_RESOLVER_CACHE_DIR": ("~no-such-user-here/x",),
}


def test_empty_environment_gives_the_defaults(monkeypatch):
    settings = Settings.from_env({})
    assert settings == Settings() == Settings.from_env({"LORA_PLUGIN_X": "1", "VLLM_X": "?", "PATH": "/bin"})
    monkeypatch.setenv("LORA_PLUGINS_BASE_MATCH", "off")
    assert Settings.from_env().base_match is BaseMatch.OFF
    assert (settings.base_match, settings.base_aliases) == (BaseMatch.COMPATIBLE, ())
    assert (settings.max_adapter_bytes, settings.store_max_bytes) == (8 << 30, None)
    assert (settings.link_roots, settings.allow_pickle, settings.check_finite) == ((), False, True)


@pytest.mark.parametrize("name", VALID)
def test_valid_values_are_read(name):
    field, values = VALID[name]
    assert {text: getattr(Settings.from_env({name: text}), field) for text in values} == values


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in INVALID.items() for text in texts])
def test_error_of_an_invalid_value_names_variable_value_and_remedy(name, text):
    with pytest.raises(InvalidSettings) as caught:
        Settings.from_env({name: text})
    assert f"{name}={text!r}" in caught.value.found
    assert caught.value.expected
    assert name in caught.value.remedy


def test_every_own_variable_is_tested_above():
    assert VALID.keys() >= OWN_VARIABLES


def test_settings_page_is_what_the_declarations_say():
    assert write_settings_doc.main(["--check"]) == 0


@pytest.mark.parametrize("variable", VARIABLES.values(), ids=lambda variable: variable.name)
def test_default_written_out_changes_nothing(variable):
    if variable.default is not None and variable.name != "LORA_PLUGINS_STORE_DIR":
        assert Settings.from_env({variable.name: variable.default}) == Settings.from_env({})


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_user_without_home_needs_a_store():
    """As OpenShift and Docker run containers: a uid without an entry in passwd, and no HOME, or / as HOME."""
    code = """
import itertools, os
from lora_plugins.errors import InvalidSettings
from lora_plugins.settings import Settings
users = [(2_000_123_456, None), (2_000_123_456, "/"), (2_000_123_456, ""), (0, "/")]
for (uid, home), text in itertools.product(users, [None, "", "~/store"]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, (uid, home, text)
        continue
    os.environ.pop("HOME", None)
    os.environ.update({} if home is None else {"HOME": home})
    os.setuid(uid)
    assert str(Settings.from_env({"LORA_PLUGINS_STORE_DIR": "/x"}).store_dir) == "/x"
    assert str(Settings.from_env({"XDG_CACHE_HOME": "/x"}).store_dir) == "/x/lora-plugins"
    try:
        Settings.from_env({} if text is None else {"LORA_PLUGINS_STORE_DIR": text})
    except InvalidSettings as error:
        if not text:
            assert "no home directory for the default of LORA_PLUGINS_STORE_DIR" in str(error)
        do = "correct or unset" if text else "set"
        assert f"To fix: {do} LORA_PLUGINS_STORE_DIR." in str(error), str(error)
    else:
        raise AssertionError(text)
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_commands_of_a_user_without_home_name_the_variable():
    """In a container, where such a user may write nothing below /, nothing is written there."""
    code = """
import os, sys
from lora_plugins.cli.commands import run
os.environ["HOME"] = "/"
os.setuid(2_000_123_456)
sys.exit(run(["ls"]))
"""
    env = {name: text for name, text in os.environ.items() if not name.startswith(("LORA_PLUGINS_", "XDG_"))}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (ended.returncode, "To fix: set LORA_PLUGINS_STORE_DIR." in ended.stderr) == (Exit.SETTINGS, True)
    assert not Path("/.cache").exists()


def test_credentials_are_read_and_never_shown():
    settings = Settings.from_env({"AWS_SECRET_ACCESS_KEY": "s3cr3t"})
    assert settings.aws["AWS_SECRET_ACCESS_KEY"] == "s3cr3t"
    assert "s3cr3t" not in repr(settings)
    assert "s3cr3t" not in repr(Settings.from_env({"LORA_PLUGINS_ADMIN_KEY": "s3cr3t"}))


@pytest.mark.parametrize("text", ["", " ", "s3cr3t key", "s3cr3t\n", "s3cr3t\u00e9"])
def test_a_key_that_no_header_carries_is_an_error(text):
    """An empty one too: else a secret that was not mounted would let in whom it was to keep out."""
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_ADMIN_KEY=…") as caught:
        Settings.from_env({"LORA_PLUGINS_ADMIN_KEY": text})
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_like_one"),
    [
        ("LORA_PLUGINS_BASE_MACTH", True),
        ("LORA_PLUGINS_base_match", True),
        ("LORA_PLUGINS_", False),
        ("LORA_PLUGINS_TYPO", False),
    ],
)
def test_unknown_own_variable_is_an_error_with_the_nearest_name(name, is_like_one):
    with pytest.raises(InvalidSettings, match=name) as caught:
        Settings.from_env({name: "1"})
    said = f"did you mean LORA_PLUGINS_BASE_MATCH? If not, unset {name}"
    assert caught.value.remedy == said if is_like_one else "did you mean" not in caught.value.remedy


@pytest.mark.parametrize("service", ["", "SERVER_"])
def test_variables_of_a_kubernetes_service_are_no_settings(service):
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    assert Settings.from_env({f"LORA_PLUGINS_{service}{name}": "x" for name in names}) == Settings.from_env({})


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        *[(text, 20 << 30) for text in ("20Gi", "20GiB", "20gib", " 20 Gi ")],
        *[(text, 20 * 10**9) for text in ("20G", "20GB", "20gb")],
        *[("500M", 500 * 10**6), ("500Mi", 500 << 20), ("3Ti", 3 << 40), ("3TB", 3 * 10**12)],
        *[("4K", 4000), ("4ki", 4096), ("7", 7), ("7B", 7)],
    ],
)
def test_sizes_are_read_as_kubernetes_writes_them(text, size_bytes):
    assert Settings.from_env({"LORA_PLUGINS_STORE_MAX_BYTES": text}).store_max_bytes == size_bytes


@pytest.mark.parametrize("text", ["20Gib/s", "20 G B", "20iB", "0Gi", "1e9", "2,5G", "20Gi20"])
def test_wrong_sizes_are_told_what_a_size_is(text):
    with pytest.raises(InvalidSettings, match="20Gi or 20GiB"):
        Settings.from_env({"LORA_PLUGINS_STORE_MAX_BYTES": text})


def test_relative_root_becomes_absolute_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert Settings.from_env({"VLLM_LORA_RESOLVER_CACHE_DIR": "a/b"}).filesystem_root == tmp_path / "a" / "b"
    home = Settings.from_env({"VLLM_LORA_RESOLVER_CACHE_DIR": "~/a"}).filesystem_root
    assert home == Path("/home/someone/a")


@pytest.mark.parametrize(
    ("value", "named"),
    [(None, False), ("", False), ("a", True), ("b,a", True), ("a,b", True), ("ab", False), ("b", False)],
)
def test_plugin_name_is_read_as_vllm_reads_it(value, named):
    # vLLM splits at commas and strips nothing, so " a" is another name to it.
    assert named_in_environment("a", {} if value is None else {"VLLM_PLUGINS": value}) is named
    assert named_in_environment("a", {"VLLM_PLUGINS": "b, a"}) is False


def test_no_other_module_reads_the_environment():
    package = Path(lora_plugins.__file__).parent
    for path in package.rglob("*.py"):
        if path.name == "settings.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            used = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
            assert not used, f"{path}:{getattr(node, 'lineno', 0)}"
