"""Bad inputs end in one of our errors and a documented exit code, never in a traceback; so do pipes and signals."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest

import lora_plugins.errors
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.cli import Exit, exit_of
from lora_plugins.cli.commands import EXAMPLES
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import Settings
from tests.cli.common import Done, ended, on_terminal, outside, started
from tests.make import adapter_files, put

FILES = adapter_files()


def broken(**files: bytes | None) -> dict[str, bytes]:
    names = {"config": CONFIG_FILE, "weights": WEIGHTS_FILE}
    made = {**FILES, **{names.get(name, name): data for name, data in files.items()}}
    return {name: data for name, data in made.items() if data is not None}


ADAPTERS = {
    "no-weights": (broken(weights=None), Exit.NOT_FOUND, "L002"),
    "empty": ({}, Exit.NOT_FOUND, "L002"),
    "truncated-weights": (broken(weights=FILES[WEIGHTS_FILE][:-1]), Exit.WRONG, "L005"),
    "pickle": ({CONFIG_FILE: FILES[CONFIG_FILE], "adapter_model.bin": b"\x80"}, Exit.WRONG, "L005"),
    "qalora": (adapter_files(use_qalora=True), Exit.WRONG, "L003"),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_inspect_pull_and_why_say_what_is_wrong(cli, kind):
    files, code, said = ADAPTERS[kind]
    done = cli("inspect", put(cli.adapters / kind, files))
    done.assert_no_traceback()
    assert (done.code, f"[{said}]" in done.err) == (code, True)
    assert "would be refused" in done.out
    error = cli("inspect", cli.adapters / kind, "--json").only["error"]
    assert error["code"] == said
    assert set(error) == {"code", "kind", "message", "found", "expected", "remedy", "adapter", "file", "place"}
    for command in ("pull", "why") if files else ():
        done = cli(command, kind, "--json")
        done.assert_no_traceback()
        assert (done.code, done.only["error"]["code"], done.err) == (code, said, "")
        assert done.only["error"]["adapter"] == kind


WRONG_ARGUMENTS = {
    "no directory": (["inspect", "/no/such/directory"], Exit.NOT_FOUND),
    "a file": (["inspect", __file__], Exit.NOT_FOUND),
    "a name that leaves the root": (["pull", "../sql"], Exit.NOT_FOUND),
    "an absolute name": (["pull", "/etc/passwd"], Exit.NOT_FOUND),
    "a name with a line break": (["why", "a\nb"], Exit.NOT_FOUND),
    "a name too long": (["pull", "a" * 5000], Exit.NOT_FOUND),
    "a path too long": (["inspect", "a" * 5000], Exit.NOT_FOUND),
    "a path with NUL": (["inspect", "a\0b"], Exit.NOT_FOUND),
    "a name that nobody has": (["pull", "nobody"], Exit.NOT_FOUND),
    "an unknown digest": (["verify", "0123456789ab"], Exit.NOT_FOUND),
    "no digest": (["verify", "../../etc"], Exit.NOT_FOUND),
    "a digest too short": (["verify", "ab"], Exit.NOT_FOUND),
    "a URI that climbs": (["pull", "file:///a/../b"], Exit.WRONG),
    "a URI with a password": (["pull", "s3://user:secret@bucket/x"], Exit.WRONG),
    "a URI with a password to inspect": (["inspect", "s3://user:secret@bucket/x"], Exit.WRONG),
    "a URI with a password to remove": (["rm", "s3://user:secret@bucket/x"], Exit.NOT_FOUND),
    "a URI of nothing": (["inspect", "nothing://bucket/x"], Exit.UNAVAILABLE),
    "a URI of FTP": (["pull", "ftp://127.0.0.1:1/x"], Exit.UNAVAILABLE),
    "a URI with nothing there": (["pull", f"file://{Path(__file__).parent}/nothing"], Exit.NOT_FOUND),
    "a URI of what is not mounted": (["pull", "file:///no/such/adapter"], Exit.UNAVAILABLE),
    "no such command": (["serve"], Exit.USAGE),
    "no such option": (["ls", "--all"], Exit.USAGE),
    "no name": (["why"], Exit.USAGE),
    "nothing to remove": (["rm"], Exit.USAGE),
    "a server's list and the sources'": (["ls", "--remote", "--server"], Exit.USAGE),
    "no number": (["doctor", "--timeout", "soon"], Exit.USAGE),
    "no budget": (["gc", "--dry-run"], Exit.USAGE),
    "no bytes": (["gc", "--max-bytes", "much"], Exit.USAGE),
    "no base model": (["inspect", "/tmp", "--base-model", "/no/such/model"], Exit.USAGE),
    "a rank without a base model": (["why", "sql", "--max-lora-rank", "8"], Exit.USAGE),
    "a file that is not there": (["load", "--file", "/no/such/file"], Exit.USAGE),
    "a uri for two names": (["load", "a", "b", "--uri", "s3://b/x"], Exit.USAGE),
    "a digest for two names": (["refresh", "a", "b", "--if-match", "0" * 12], Exit.USAGE),
    "no name to refresh": (["refresh"], Exit.USAGE),
    "no digest to go back to": (["rollback", "a", "--to", "yesterday"], Exit.USAGE),
    "no address": (["pin", "a", "--url", "gpu-7:8000"], Exit.USAGE),
    "a key on the command line": (["pin", "a", "--api-key", "secret"], Exit.USAGE),
    "no such way to pause": (["pause", "x", "--mode", "soon"], Exit.USAGE),
    "an empty directory's name": (["inspect", ""], Exit.USAGE),
    "an empty name": (["load", ""], Exit.USAGE),
    "half a character": (["load", "\udcff"], Exit.USAGE),
}


@pytest.mark.parametrize("kind", WRONG_ARGUMENTS)
def test_wrong_arguments(cli, kind):
    arguments, code = WRONG_ARGUMENTS[kind]
    done = cli(*arguments)
    done.assert_no_traceback()
    assert done.code == code
    assert "secret" not in done.out + done.err
    if code is Exit.USAGE:
        assert done.out == ""
        assert done.err.startswith("error: ")
        for words in ("Value error", "String should", "Input should", "^["):
            assert words not in done.err, "said in our words"
    done = cli(*arguments, "--json")
    assert done.code == code
    assert done.err == ""
    rows = done.json.get("adapters", [])
    (error,) = [row["error"] for row in rows or [done.json]]
    assert error["message"]
    assert (error["code"] == "usage") == (code is Exit.USAGE)


def test_without_a_command_the_help_is_shown(cli):
    done = cli()
    assert done.code == Exit.USAGE
    commands = re.findall(r"^  (\w+) ", done.err.partition("Commands:")[2].partition("Exit")[0], re.MULTILINE)
    assert sorted(commands) == sorted(EXAMPLES)
    assert "..." not in done.err.partition("Commands:")[2]


def test_settings_that_cannot_be_right(cli):
    cli.env["LORA_PLUGINS_STORE_MAX_BYTES"] = "plenty"
    for command in (["ls"], ["why", "sql"], ["gc"]):
        done = cli(*command)
        done.assert_no_traceback()
        assert (done.code, done.out) == (Exit.SETTINGS, "")
        assert "LORA_PLUGINS_STORE_MAX_BYTES='plenty'" in done.err


@pytest.mark.parametrize("command", ["pull", "why"])
def test_an_environment_without_a_source(cli, command):
    del cli.env["VLLM_PLUGINS"]
    done = cli(command, "sql")
    assert done.code == Exit.SETTINGS
    assert "no source of adapters in this environment" in done.out + done.err
    assert ("the server gives no answer" in done.out) == (command == "why")


def test_a_root_that_is_gone_is_not_a_missing_adapter(cli):
    cli.env["VLLM_LORA_RESOLVER_CACHE_DIR"] = str(cli.root / "unmounted")
    done = cli("pull", "sql")
    assert (done.code, "[L007]" in done.err) == (Exit.SETTINGS, True)


@pytest.mark.usefixtures("permissions_count")
@pytest.mark.parametrize(
    ("place", "code", "says"),
    [
        ("", Exit.NOT_FOUND, "ROOT': found no adapter, but a folder of 2 adapters; .* lora-plugins inspect 'ROOT/\\*'"),
        ("team", Exit.NOT_FOUND, "a folder of 1 adapter; .*'ROOT/team/\\*'"),
        (f"sql/{WEIGHTS_FILE}", Exit.NOT_FOUND, "no directory, but a file; .* lora-plugins inspect ROOT/sql"),
        ("denied", Exit.UNAVAILABLE, "ROOT/denied': found a file system that answers 'Permission denied'"),
    ],
)
def test_inspect_says_what_is_there_in_place_of_an_adapter(cli, place, code, says):
    (cli.adapters / "denied").mkdir(0)
    done = cli("inspect", cli.adapters / place)
    assert done.code == code
    assert re.search(says.replace("ROOT", str(cli.adapters)), done.err)


@pytest.mark.usefixtures("permissions_count")
def test_what_may_not_be_read(cli):
    weights = cli.adapters / "sql" / WEIGHTS_FILE
    weights.chmod(0)
    for command in (["inspect", cli.adapters / "sql"], ["pull", "sql"]):
        done = cli(*command)
        done.assert_no_traceback()
        assert (done.code, "[L006]" in done.err) == (Exit.UNAVAILABLE, True)
    weights.chmod(0o644)
    cli.adapters.chmod(0)
    try:
        done = cli("inspect", cli.adapters / "sql")
    finally:
        cli.adapters.chmod(0o755)
    done.assert_no_traceback()
    assert (done.code, "Permission denied" in done.err) == (Exit.UNAVAILABLE, True)


def test_a_store_that_is_a_file(cli):
    cli.store.write_bytes(b"")
    for command in (["ls"], ["pull", "sql"], ["verify"], ["gc", "--max-bytes", "0"]):
        done = cli(*command)
        done.assert_no_traceback()
        assert (done.code, "[L007]" in done.err) == (Exit.SETTINGS, True)


def test_control_characters_of_files_do_not_reach_the_terminal(cli):
    put(cli.root / "evil", adapter_files(base_model_name_or_path="org/\u202etiny", target_modules=["q_proj", "v_proj"]))
    done = cli("inspect", cli.root / "evil")
    assert "\u202e" not in done.out
    assert "\\u202e" in done.out


# --- as a process


def test_every_error_of_ours_has_an_exit_code():
    kinds = [
        kind
        for kind in vars(lora_plugins.errors).values()
        if isinstance(kind, type) and kind.__mro__[1] is LoRAPluginsError
    ]
    assert len(kinds) == 13
    assert all(exit_of(kind("x")) in set(Exit) - {Exit.OK, Exit.USAGE, Exit.BUG} for kind in kinds)


def test_a_pipe_that_is_closed_early(cli):
    process = started("ls", "--json", env=cli.env)
    process.stdout.close()
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (Exit.BROKEN_PIPE, "")


@pytest.mark.parametrize("argument", ["--help", "ls"])
def test_a_full_pipe_is_no_bug(cli, argument):
    with Path("/dev/full").open("w") as full:
        done = ended(started(argument, env=cli.env, stdout=full))
    assert done.code != 0
    assert "Traceback" not in done.err


@pytest.mark.parametrize("uri", ["URL/sql", "hf://acme/sql"])
def test_ctrl_c(cli, uri):
    """While a server that takes connections says nothing, be it to the event loop or to a thread."""
    # What a shell starts in the background ignores the signal, and with it the test would.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        # It does not end by itself while this test lasts.
        waits = dict.fromkeys(
            ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT", "LORA_PLUGINS_FETCH_TIMEOUT_S"), "1000"
        )
        env = cli.env | waits | {"HF_ENDPOINT": url, "HF_HOME": str(cli.root)}
        process = started("pull", uri.replace("URL", url), env=env, before=heed)
        connection, _ = silent.accept()
        connection.settimeout(60)
        assert connection.recv(1), "it has asked, and waits for an answer"
        process.send_signal(signal.SIGINT)
        assert ended(process) == Done(Exit.INTERRUPTED, "", "interrupted\n")
        connection.close()
    assert list((cli.store / ".tmp").iterdir()) == []


def test_colours_only_on_terminals_and_never_with_no_color(cli):
    assert "\x1b" not in outside("ls", env=cli.env).out
    assert "\x1b[" in on_terminal(cli, "inspect", str(cli.adapters / "sql"), env={"TERM": "xterm"})
    plain = on_terminal(cli, "inspect", str(cli.adapters / "sql"), env={"TERM": "xterm", "NO_COLOR": "1"})
    assert "whole, and not compared" in plain
    assert "\x1b" not in plain, "bold is a code too"


def test_a_terminal_without_utf8_gets_escapes(cli):
    put(cli.adapters / "größe", adapter_files())
    done = ended(started("why", "größe", env={**cli.env, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}))
    done.assert_no_traceback()
    assert done.code == Exit.NOT_COMPARED
    assert "gr\\xf6\\xdfe: whole" in done.out


def test_neither_vllm_nor_torch_is_imported_where_nothing_needs_them(cli):
    script = (
        "import sys\n"
        "from lora_plugins.cli.commands import run\n"
        "for command in (['ls'], ['pull', 'sql'], ['why', 'sql'], ['verify'], ['doctor', '--no-network']):\n"
        "    assert run(command) == (7 if command[0] == 'why' else 0), command\n"
        "    heavy = [name for name in ('vllm', 'torch', 'transformers', 'fastapi') if name in sys.modules]\n"
        "    assert not heavy, (command, heavy)\n"
        "sys.exit()\n"
    )
    done = ended(started(env=cli.env, before=script))
    assert done.code == 0, done


def test_a_bug_is_one_line_and_traced_on_request(cli, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(Settings, "from_env", fail)
    done = cli("ls")
    assert done.code == Exit.BUG
    assert done.err == "error: RuntimeError: first line. This should not happen; --debug shows where it did\n"
    assert json.loads(cli("ls", "--json").out)["error"]["code"] == "bug"
    assert "Traceback" in cli("--debug", "ls").err
