"""Settings: each variable right and wrong; nothing misspelled goes unnoticed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lora_plugins
from lora_plugins.errors import InvalidSettings
from lora_plugins.settings import OWN_VARIABLES, BaseMatch, Settings, named_in_environment

RIGHT = [
    ("LORA_PLUGINS_BASE_MATCH", "strict", "base_match", BaseMatch.STRICT),
    ("LORA_PLUGINS_BASE_MATCH", " Compatible ", "base_match", BaseMatch.COMPATIBLE),
    ("LORA_PLUGINS_BASE_MATCH", "OFF", "base_match", BaseMatch.OFF),
    ("LORA_PLUGINS_BASE_ALIASES", "org/a, b ,,c", "base_aliases", ("org/a", "b", "c")),
    ("LORA_PLUGINS_BASE_ALIASES", "", "base_aliases", ()),
    *[
        (name, text, field, value)
        for name, field in [
            ("LORA_PLUGINS_FOLLOW_SYMLINKS", "follow_symlinks"),
            ("LORA_PLUGINS_ALLOW_PICKLE", "allow_pickle"),
            ("LORA_PLUGINS_CHECK_FINITE", "check_finite"),
        ]
        for text, value in [("1", True), ("true", True), ("On", True), ("0", False), ("no", False), ("FALSE", False)]
    ],
    ("LORA_PLUGINS_MAX_ADAPTER_BYTES", "1", "max_adapter_bytes", 1),
    ("LORA_PLUGINS_MAX_ADAPTER_BYTES", "8GiB", "max_adapter_bytes", 8 << 30),
    ("LORA_PLUGINS_MAX_ADAPTER_BYTES", "500 mb", "max_adapter_bytes", 500_000_000),
    ("LORA_PLUGINS_MAX_ADAPTER_BYTES", "2kib", "max_adapter_bytes", 2048),
    ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1", "runtime_lora_updating", True),
    ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True", "runtime_lora_updating", True),
    ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0", "runtime_lora_updating", False),
    ("VLLM_LORA_RESOLVER_CACHE_DIR", "/srv/adapters", "filesystem_root", Path("/srv/adapters")),
    ("VLLM_LORA_RESOLVER_CACHE_DIR", "", "filesystem_root", None),
]
WRONG = [
    *[("LORA_PLUGINS_BASE_MATCH", text) for text in ("", "loose", "strict,off")],
    *[
        (name, text)
        for name in ("LORA_PLUGINS_FOLLOW_SYMLINKS", "LORA_PLUGINS_ALLOW_PICKLE", "LORA_PLUGINS_CHECK_FINITE")
        for text in ("2", "maybe", "-1", "1 0")
    ],
    *[("LORA_PLUGINS_MAX_ADAPTER_BYTES", text) for text in ("", "0", "-1", "8 PB", "1.5GiB", "GiB", "9" * 40, "inf")],
]


def test_an_empty_environment_gives_the_defaults():
    assert Settings.from_env({}) == Settings()
    assert Settings() == Settings(
        runtime_lora_updating=False,
        filesystem_root=None,
        base_match=BaseMatch.COMPATIBLE,
        base_aliases=(),
        follow_symlinks=False,
        allow_pickle=False,
        check_finite=True,
        max_adapter_bytes=8 << 30,
    )


@pytest.mark.parametrize(("name", "text", "field", "value"), RIGHT)
def test_a_right_value_is_read(name, text, field, value):
    settings = Settings.from_env({name: text})
    assert getattr(settings, field) == value


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_a_wrong_value_names_the_variable_the_value_and_what_is_right(name, text):
    with pytest.raises(InvalidSettings) as caught:
        Settings.from_env({name: text})
    assert f"{name}={text!r}" in caught.value.found
    assert caught.value.expected
    assert name in caught.value.remedy


def test_every_variable_of_ours_is_tried_above():
    assert {name for name, *_ in RIGHT if name.startswith("LORA_PLUGINS_")} >= OWN_VARIABLES - {
        # Later sources bring variables of their own tests.
        name
        for name in OWN_VARIABLES
        if name.startswith(("LORA_PLUGINS_S3_", "LORA_PLUGINS_HUB_", "LORA_PLUGINS_STORE_"))
    }


@pytest.mark.parametrize("name", ["LORA_PLUGINS_BASE_MACTH", "LORA_PLUGINS_", "LORA_PLUGINS_base_match"])
def test_an_unknown_variable_of_ours_is_refused(name):
    with pytest.raises(InvalidSettings, match=name) as caught:
        Settings.from_env({name: "1"})
    assert "LORA_PLUGINS_BASE_MATCH" in caught.value.expected


def test_other_peoples_variables_are_left_alone():
    assert Settings.from_env({"LORA_PLUGIN_X": "1", "VLLM_X": "?", "PATH": "/bin"}) == Settings()


def test_a_relative_root_becomes_absolute_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert Settings.from_env({"VLLM_LORA_RESOLVER_CACHE_DIR": "a/b"}).filesystem_root == tmp_path / "a" / "b"
    home = Settings.from_env({"VLLM_LORA_RESOLVER_CACHE_DIR": "~/a"}).filesystem_root
    assert home == Path("/home/someone/a")


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("LORA_PLUGINS_BASE_MATCH", "off")
    assert Settings.from_env().base_match is BaseMatch.OFF


@pytest.mark.parametrize(
    ("value", "named"),
    [(None, False), ("", False), ("a", True), ("b,a", True), ("a,b", True), ("ab", False), ("b", False)],
)
def test_a_plugin_is_named_only_where_vllm_reads_its_name(value, named):
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


def test_an_empty_flag_is_its_default():
    assert Settings.from_env({"LORA_PLUGINS_CHECK_FINITE": ""}).check_finite


def test_a_home_of_nobody_is_refused():
    with pytest.raises(InvalidSettings, match="VLLM_LORA_RESOLVER_CACHE_DIR"):
        Settings.from_env({"VLLM_LORA_RESOLVER_CACHE_DIR": "~no-such-user-here/x"})
