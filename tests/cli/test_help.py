"""What the command line says of itself: help with examples, version, completion."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys

import pytest
import typer

import lora_plugins
from lora_plugins.cli.commands import EXAMPLES, app
from tests.cli.common import Cli


@pytest.mark.parametrize("command", EXAMPLES)
def test_each_help_ends_with_examples_that_can_be_run(cli, command):
    done = cli(command, "--help")
    examples = done.out.partition("Examples:\n")[2].splitlines()
    assert examples
    commands = typer.main.get_command(app).commands
    for example in examples:
        program, name, *arguments = shlex.split(example)
        assert (program, name) == ("lora-plugins", command)
        commands[name].make_context(name, arguments)  # raises where an option or a value cannot be right


def test_the_version_has_a_short_option(cli):
    assert cli("-V").out == cli("--version").out == f"lora-plugins {lora_plugins.__version__}\n"
    assert cli("-V").code == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(cli: Cli, tmp_path):
    """A real bash, with the script that --install-completion writes for it."""
    program = tmp_path / "bin" / "lora-plugins"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom lora_plugins.cli import main\nmain()\n")
    program.chmod(0o755)
    script = (
        f"export PATH={program.parent}:$PATH; lora-plugins --install-completion >/dev/null; . ~/.bashrc;"
        'set -- $(complete -p lora-plugins); while [ "$1" != -F ]; do shift; done;'
        "for COMP_LINE in 'lora-plugins re' 'lora-plugins refresh --if'; do"
        " COMP_WORDS=($COMP_LINE); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); $2 lora-plugins; echo ${COMPREPLY[@]};"
        " done"
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**cli.env, "HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [sorted(line.split()) for line in done.stdout.splitlines()] == [["refresh", "resume"], ["--if-match"]]
