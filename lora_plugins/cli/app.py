"""The application: every command, and how what goes wrong in one becomes a line and an exit code."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from typing import Annotated, ParamSpec

import typer

from lora_plugins.adapter.files import map_os_error
from lora_plugins.cli.changes import load, pin, prefetch, refresh, rollback, unload, unpin
from lora_plugins.cli.doctor.doctor import doctor
from lora_plugins.cli.examples import EXAMPLES
from lora_plugins.cli.exits import Exit, UsageProblem, exit_of
from lora_plugins.cli.gc import gc
from lora_plugins.cli.inspect import inspect
from lora_plugins.cli.ls import ls
from lora_plugins.cli.output import Output
from lora_plugins.cli.pull import pull
from lora_plugins.cli.resolve import resolve
from lora_plugins.cli.rm import rm
from lora_plugins.cli.top import top
from lora_plugins.cli.verify import verify
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.settings import environment

P = ParamSpec("P")

_COMPLETION = "_LORA_PLUGINS_COMPLETE"  # set by the scripts that Typer installs, which call without arguments

app = typer.Typer(
    name="lora-plugins",
    help="LoRA adapters for vLLM: look at them, fetch them, and see why a server does or does not serve them.",
    epilog="Exit codes: 0 done, 1 something is wrong, 2 usage, 3 not found, 4 unavailable, 5 no room, 6 settings.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; never raises."""
    # What libraries log on the way is for servers; without any handler, Python writes it to stderr.
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    output = Output(as_json="--json" in arguments)
    try:
        return _run(arguments)
    except LoRAPluginsError as error:
        output.our_error(error)
        return exit_of(error)
    except UsageProblem as error:
        return _usage(output, str(error))
    except (KeyboardInterrupt, CancelledError):
        output.errors.print("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        return Exit.BROKEN_PIPE
    except OSError as error:
        return _os_error(output, error)
    except Exception as error:  # noqa: BLE001 - the end of the line: no traceback reaches a user who did not ask for one
        message = getattr(error, "format_message", None)  # one of Typer's
        if message is not None:
            return _usage(output, str(message()))
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
        result = command.main(list(arguments), prog_name="lora-plugins", standalone_mode=False)
    except SystemExit as end:  # Typer ends by itself where a pipe is closed while it prints its help
        return end.code if isinstance(end.code, int) else Exit.BROKEN_PIPE
    if isinstance(result, BaseException):
        raise result
    sys.stdout.flush()
    return int(result or 0)


def _passing_errors(function: Callable[P, Exit]) -> Callable[P, Exit | BaseException]:
    """Return what a command raises, because Typer makes something else of interrupts and closed pipes."""

    @functools.wraps(function)
    def passing(*args: P.args, **kwargs: P.kwargs) -> Exit | BaseException:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt, CancelledError) as error:  # noqa: BLE001 - `run` handles it
            return error

    return passing


for _command in (
    doctor,
    resolve,
    inspect,
    pull,
    ls,
    verify,
    gc,
    rm,
    top,
    load,
    unload,
    refresh,
    rollback,
    pin,
    unpin,
    prefetch,
):
    app.command(epilog=EXAMPLES[_command.__name__])(_passing_errors(_command))


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
        # What is still in its buffer would raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.UNAVAILABLE
    mapped = map_os_error(error)
    mapped.file = str(error.filename or "")
    output.our_error(mapped)
    return exit_of(mapped)
