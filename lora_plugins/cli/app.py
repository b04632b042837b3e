"""The application: every command, and how errors of a command become a line and an exit code."""

from __future__ import annotations

import inspect as introspection
import logging
import os
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from lora_plugins.adapter.files import map_os_error
from lora_plugins.cli import Exit, UsageProblem, exit_of
from lora_plugins.cli.compare import compare
from lora_plugins.cli.doctor import doctor
from lora_plugins.cli.explain import explain
from lora_plugins.cli.inspect import inspect
from lora_plugins.cli.lookup import pull
from lora_plugins.cli.ls import ls
from lora_plugins.cli.output import Output, Result, error_fields
from lora_plugins.cli.store import gc, rm, verify
from lora_plugins.cli.verbs import VERBS, push
from lora_plugins.cli.why import why
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import environment

_COMPLETION = "_LORA_PLUGINS_COMPLETE"  # set by the scripts that Typer installs, which call without arguments
_OWN = (doctor, why, inspect, pull, ls, verify, gc, rm, push, compare, explain)
_COMMANDS: Sequence[Callable[..., Result]] = (*_OWN, *(verb.command() for verb in VERBS))
# By Typer's error: Typer suggests a name that is spelt alike.
_FORMER = {
    "No such command 'resolve'": "'resolve' is now 'why': lora-plugins why NAME (--no-server: the sources alone)"
}
# Examples at the end of each command's help.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "doctor": ("doctor", "doctor --url http://127.0.0.1:8000", "doctor --no-network --json"),
    "why": (
        "why team/sql --url http://gpu-7:8000",
        "why 'team/*' --no-server --dry-run",
        "why team/sql --base-model org/llama-8b --max-lora-rank 16",
    ),
    "inspect": ("inspect ./out/checkpoint-500", "inspect hf://org/repo@main --json", "inspect team/sql"),
    "pull": ("pull team/sql 'other/*'", "pull s3://bucket/loras/sql", "pull --file adapters.txt --quiet"),
    "ls": ("ls --json", "ls --remote", "ls --server --url http://gpu-7:8000"),
    "verify": ("verify", "verify 583503f503f1", "verify 'team/*'"),
    "gc": ("gc --dry-run --max-bytes 20GB", "gc"),
    "rm": ("rm team/sql", "rm 'old/*' --dry-run", "rm 583503f503f1"),
    "push": ("push ./out/checkpoint-500 policy", "push ./out policy --if-match d97bd125c00b --keep 8"),
    "compare": (
        "compare team/sql --peft ./out/checkpoint-500",
        "compare policy --trainer logprobs.jsonl --url http://gpu-7:8000",
    ),
    "explain": ("explain L003",),
    "load": (
        "load team/sql",
        "load sql --uri s3://bucket/loras/sql",
        "load --file adapters.txt --url http://gpu-7:8000",
    ),
    "unload": ("unload team/sql", "unload 'team/*' --drain 5", "unload team/sql --block"),
    "refresh": ("refresh team/sql", "refresh '*' --json", "refresh team/sql --if-match d97bd125c00b"),
    "rollback": ("rollback team/sql", "rollback team/sql --to 583503f503f1"),
    "pin": ("pin team/sql team/poet",),
    "unpin": ("unpin '*'",),
    "prefetch": ("prefetch team/sql team/poet", "prefetch --file adapters.txt"),
    "pause": ("pause policy", "pause policy --mode keep"),
    "resume": ("resume policy",),
}

app = typer.Typer(
    name="lora-plugins",
    help="LoRA adapters for vLLM: look at them, fetch them, and see why a server does or does not serve them.",
    epilog="Exit codes: 0 done, 1 something is wrong, 2 usage, 3 not found, 4 unavailable, 5 no room, 6 settings, "
    "7 not compared.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; never raises."""
    # The log of libraries is for servers; without any handler, Python writes it to stderr.
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    output = Output(as_json="--json" in arguments, quiet=not {"--quiet", "-q"}.isdisjoint(arguments))
    try:
        return _run(arguments)
    except LoRAPluginsError as error:
        return _error(output, error)
    except UsageProblem as error:
        return _usage(output, str(error))
    except (KeyboardInterrupt, CancelledError):
        output.errors.print("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        return Exit.BROKEN_PIPE
    except OSError as error:
        return _os_error(output, error)
    except Exception as error:  # noqa: BLE001 - the last handler: no traceback without --debug
        message = getattr(error, "format_message", None)  # an error of Typer's
        if message is not None:
            # Typer has pydantic convert values, whose words say nothing to a user.
            text = str(message()).replace("Value error, ", "").replace("Input should", "it should")
            return _usage(output, next((now for former, now in _FORMER.items() if text.startswith(former)), text))
        if "--debug" in arguments:
            traceback.print_exception(error, file=sys.stderr)
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        text += ". This should not happen; --debug shows where it did"
        output.error({"code": "bug", "kind": type(error).__name__, "message": text})
        return Exit.BUG


def _run(arguments: Sequence[str]) -> int:
    command = typer.main.get_command(app)
    if not arguments and _COMPLETION not in environment():
        context = command.make_context("lora-plugins", [], resilient_parsing=True)
        sys.stderr.write(context.get_help() + "\n")
        return Exit.USAGE
    try:
        # Not standalone: Typer would end the process with exit codes of its own.
        result = command.main(list(arguments), prog_name="lora-plugins", standalone_mode=False)
    except SystemExit as end:  # Typer ends by itself where a pipe is closed while it prints its help
        return end.code if isinstance(end.code, int) else Exit.BROKEN_PIPE
    if isinstance(result, BaseException):
        raise result
    sys.stdout.flush()
    return int(result or 0)


def _error(output: Output, error: LoRAPluginsError) -> Exit:
    output.error(error_fields(error))
    output.say_how_to_explain([error.code])
    return exit_of(error)


def _usage(output: Output, text: str) -> Exit:
    output.error({"code": "usage", "kind": "Usage", "message": text})
    if not output.as_json:
        output.errors.print("lora-plugins --help says what there is")
    return Exit.USAGE


def _os_error(output: Output, error: OSError) -> Exit:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return Exit.BROKEN_PIPE
    except OSError as failed:
        sys.stderr.write(f"error: stdout cannot be written: {failed.strerror}\n")
        # The rest of the buffer would raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.UNAVAILABLE
    mapped = map_os_error(error)
    mapped.file = str(error.filename or "")
    return _error(output, mapped)


def _printing(function: Callable[..., Result]) -> Callable[..., Exit | BaseException]:
    """Return a command that prints its result, with the options of every command."""
    own = dict(introspection.signature(function, eval_str=True).parameters)
    needs_output = own.pop("output", None) is not None

    def command(**given: Any) -> Exit | BaseException:
        output = Output(quiet=given.pop("quiet"), as_json=given.pop("as_json"))
        try:
            return output.show(function(output, **given) if needs_output else function(**given))
        except (Exception, KeyboardInterrupt, CancelledError) as error:  # noqa: BLE001 - `run` handles it
            return error  # a raised interrupt or closed pipe would be Typer's to handle

    common = introspection.signature(_common, eval_str=True).parameters.values()
    options = [option.replace(kind=option.KEYWORD_ONLY) for option in (*own.values(), *common)]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = introspection.Signature(options)  # type: ignore[attr-defined]
    return command


def _common(
    *,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Nothing but errors: the exit code says the rest.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A single JSON object on stdout, and nothing else.")] = False,
) -> None:
    """The options of every command."""


for _command in _COMMANDS:
    # Typer keeps the lines of a paragraph that begins with \b.
    _lines = "\n".join(("\b", "Examples:", *(f"  lora-plugins {example}" for example in EXAMPLES[_command.__name__])))
    app.command(epilog=_lines)(_printing(_command))


def _print_version(value: bool) -> None:
    if value:
        from lora_plugins import __version__

        sys.stdout.write(f"lora-plugins {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    *,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the log, and the traceback of what should not happen.")
    ] = False,
    version: Annotated[  # noqa: ARG001 - its callback ends the command
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    if debug:
        logging.basicConfig(level=logging.INFO, force=True)
