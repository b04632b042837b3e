"""The application `lora-plugins`: every command, and what becomes of an error of a command.

`main` of `cli/__init__.py` calls `run` once for each process. In: the arguments. Out: the exit code; results and
errors are printed by then.
"""

from __future__ import annotations

import inspect as introspection
import logging
import os
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Sequence
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
from lora_plugins.cli.output import Output, Result, error_fields, with_parameters
from lora_plugins.cli.store_commands import gc, rm, verify
from lora_plugins.cli.verbs import VERBS, push
from lora_plugins.cli.why import why
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import environment

_COMPLETION = "_LORA_PLUGINS_COMPLETE"  # set by the scripts that Typer installs, which call without arguments
_OWN = (doctor, why, inspect, pull, ls, verify, gc, rm, push, compare, explain)
_COMMANDS: Sequence[Callable[..., Result]] = (*_OWN, *VERBS)
EXAMPLES: dict[str, list[str]] = {}  # by command, from its docstring

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
            return _usage(output, str(message()).replace("Value error, ", "").replace("Input should", "it should"))
        if "--debug" in arguments:
            traceback.print_exception(error, file=sys.stderr)
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        text += ". This should not happen; --debug shows where it did"
        output.error({"code": "bug", "kind": type(error).__name__, "message": text})
        return Exit.BUG


def _run(arguments: Sequence[str]) -> int:
    command = typer.main.get_command(app)
    if not arguments and _COMPLETION not in environment():
        sys.stderr.write(command.make_context("lora-plugins", [], resilient_parsing=True).get_help() + "\n")
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
    needs_output = "output" in introspection.signature(function).parameters

    def command(**given: Any) -> Exit | BaseException:
        output = Output(quiet=given.pop("quiet"), as_json=given.pop("as_json"))
        try:
            return output.show(function(output, **given) if needs_output else function(**given))
        except (Exception, KeyboardInterrupt, CancelledError) as error:  # noqa: BLE001 - `run` handles it
            return error  # a raised interrupt or closed pipe would be Typer's to handle

    return with_parameters(command, function, _common, leaves_out=("output",))


def _common(
    *,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors alone: the exit code says the rest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A single JSON object on stdout, and nothing else.")] = False,
) -> None:
    """The options of every command."""


for _command in _COMMANDS:
    _help, _, _examples = (introspection.getdoc(_command) or "").partition("\n\nExamples:\n")
    EXAMPLES[_command.__name__] = [example.strip() for example in _examples.splitlines()]
    # Typer keeps the lines of a paragraph that begins with \b.
    _lines = "\n".join(("\b", "Examples:", *(f"  lora-plugins {one}" for one in EXAMPLES[_command.__name__])))
    app.command(_command.__name__, help=_help, epilog=_lines)(_printing(_command))


def _print_version(value: bool) -> None:
    if value:
        from lora_plugins import __version__

        sys.stdout.write(f"lora-plugins {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the log, and the traceback of a bug.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback ends the command
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    if debug:
        logging.basicConfig(level=logging.INFO, force=True)
