"""The commands and their options; what they do stands in the modules of their names."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec

import typer

from lora_plugins.adapter.files import map_os_error
from lora_plugins.cli.exits import Exit, UsageProblem, exit_of
from lora_plugins.cli.output import Output, error_fields
from lora_plugins.errors import LoRAPluginsError, describing
from lora_plugins.settings import Settings, environment
from lora_plugins.variables import bytes_of

P = ParamSpec("P")

app = typer.Typer(
    name="lora-plugins",
    help="LoRA adapters for vLLM: look at them, fetch them, and see why a server does or does not serve them.",
    epilog="Exit codes: 0 done, 1 something is wrong, 2 usage, 3 not found, 4 unavailable, 5 no room, 6 settings.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")]
Base = Annotated[
    str | None, typer.Option("--base-model", help="Path or Hub id of the base model that the server serves.")
]
Served = Annotated[
    list[str] | None, typer.Option("--served-model-name", help="The server's names for it; may be repeated.")
]
MaxRank = Annotated[int | None, typer.Option("--max-lora-rank", min=1, help="The server's largest rank.")]

_debug = False


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; never raises."""
    as_json = "--json" in arguments
    # What libraries log on the way is for servers; without any handler, Python writes it to stderr.
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    try:
        command = typer.main.get_command(app)
        if not arguments:
            context = command.make_context("lora-plugins", [], resilient_parsing=True)
            sys.stderr.write(context.get_help() + "\n")
            return Exit.USAGE
        code = command.main(list(arguments), prog_name="lora-plugins", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:
        return Exit.BROKEN_PIPE
    except OSError as error:  # commands explain their own; what is left is stdout's
        sys.stderr.write(f"error: stdout cannot be written: {error.strerror}\n")
        # What is still in its buffer would raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.UNAVAILABLE
    except SystemExit as end:
        # Typer ends by itself where a pipe is closed while it prints its help.
        return end.code if isinstance(end.code, int) else Exit.BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the end of the line: no traceback reaches a user
        message = getattr(error, "format_message", None)
        if message is None:
            return _bug(Output(as_json=as_json), error)
        return _usage(Output(as_json=as_json), str(message()))


def _command(name: str) -> Callable[[Callable[P, Exit]], Callable[P, Exit]]:
    """Register a command whose errors become exit codes."""

    def register(function: Callable[P, Exit]) -> Callable[P, Exit]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> Exit:
            output = Output(as_json=bool(kwargs.get("as_json")))
            try:
                return function(*args, **kwargs)
            except LoRAPluginsError as error:
                output.error(error_fields(error))
                return exit_of(error)
            except UsageProblem as error:
                return _usage(output, str(error))
            except (KeyboardInterrupt, asyncio.CancelledError):
                output.errors.print("interrupted")
                return Exit.INTERRUPTED
            except BrokenPipeError:
                return Exit.BROKEN_PIPE
            except OSError as error:
                sys.stdout.flush()  # raises where it was stdout's
                mapped = map_os_error(error)
                mapped.file = str(error.filename or "")
                output.error(error_fields(mapped))
                return exit_of(mapped)
            except Exception as error:  # noqa: BLE001 - no traceback reaches a user who did not ask for one
                return _bug(output, error)

        app.command(name)(guarded)
        return guarded

    return register


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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    global _debug
    _debug = debug
    if debug:
        logging.basicConfig(level=logging.INFO, force=True)


@_command("doctor")
def doctor(
    *,
    network: Annotated[bool, typer.Option(help="Ask S3 and the Hub whether they answer.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for each question.")] = 5.0,
    as_json: Json = False,
) -> Exit:
    """Say what is on, off or broken in this environment, and why."""
    from lora_plugins.cli.doctor.examination import examine
    from lora_plugins.cli.report import report_findings

    return report_findings(Output(as_json=as_json), examine(environment(), network=network, timeout_s=timeout_s))


@_command("resolve")
def resolve(
    name: Annotated[str, typer.Argument(help="The adapter's name, as a request's model field has it.")],
    *,
    base_model: Base = None,
    served_model_name: Served = None,
    max_lora_rank: MaxRank = None,
    as_json: Json = False,
) -> Exit:
    """Go the way of one name as a server would, step by step."""
    from lora_plugins.cli.resolve import resolve as go

    settings = Settings.from_env()
    return go(Output(as_json=as_json), settings, name, _base(settings, base_model, served_model_name, max_lora_rank))


@_command("inspect")
def inspect(
    adapter: Annotated[str, typer.Argument(help="A directory, a URI, or the beginning of a digest in the store.")],
    *,
    base_model: Base = None,
    served_model_name: Served = None,
    max_lora_rank: MaxRank = None,
    as_json: Json = False,
) -> Exit:
    """Say what an adapter is, and whether it would be served."""
    from lora_plugins.cli.inspect import inspect as go
    from lora_plugins.cli.inspect import subject

    output = Output(as_json=as_json)
    settings = Settings.from_env()
    base = _base(settings, base_model, served_model_name, max_lora_rank)
    with describing(adapter=adapter if "://" in adapter else ""):
        path, uri = subject(output, settings, adapter)
        return go(output, settings, path, base, uri=uri)


@_command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="The adapter's name, or a URI.")],
    *,
    base_model: Annotated[
        str, typer.Option("--base-model", help="What {base_model_name} stands for in S3_PATH_TEMPLATE.")
    ] = "",
    as_json: Json = False,
) -> Exit:
    """Bring an adapter into the store, verified."""
    from lora_plugins.cli.pull import pull as go

    return go(Output(as_json=as_json), Settings.from_env(), name, base_model)


@_command("ls")
def ls(*, as_json: Json = False) -> Exit:
    """List what is in the store."""
    from lora_plugins.cli.stored import ls as go

    return go(Output(as_json=as_json), Settings.from_env())


@_command("verify")
def verify(
    digests: Annotated[
        list[str] | None, typer.Argument(help="Beginnings of digests; all adapters without any.")
    ] = None,
    *,
    as_json: Json = False,
) -> Exit:
    """Hash what is in the store again; put damage aside."""
    from lora_plugins.cli.stored import verify as go

    return go(Output(as_json=as_json), Settings.from_env(), digests or ())


@_command("gc")
def gc(
    *,
    max_bytes: Annotated[
        str | None, typer.Option(help="The budget to reach, such as 20GB; LORA_PLUGINS_STORE_MAX_BYTES without it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: Json = False,
) -> Exit:
    """Remove what was used longest ago, until the rest fits.

    Adapters that a running server has leased stay.
    """
    from lora_plugins.cli.stored import gc as go

    budget = None
    if max_bytes is not None:
        budget = 0 if max_bytes.strip() == "0" else bytes_of(max_bytes)
        if budget is None:
            raise UsageProblem(f"--max-bytes {max_bytes}: not a number of bytes, such as 20GB or 500MiB")
    return go(Output(as_json=as_json), Settings.from_env(), budget, dry_run=dry_run)


@_command("top")
def top(
    *,
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://localhost:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", show_envvar=True, help="A key that may use the admin API.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 2.0,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one answer.")] = 5.0,
    as_json: Json = False,
) -> Exit:
    """Watch the adapters of a server that runs lora_admin."""
    from lora_plugins.cli.top import top as go

    return go(Output(as_json=as_json), url, api_key, interval_s=interval_s, once=once, timeout_s=timeout_s)


def _base(settings: Settings, path: str | None, served_names: Sequence[str] | None, max_rank: int | None) -> Any:
    if path is None:
        if served_names or max_rank is not None:
            raise UsageProblem(
                "--served-model-name and --max-lora-rank say something of a base model: give --base-model"
            )
        return None
    from lora_plugins.cli.base import read_base

    return read_base(path, served_names or (), max_rank, settings)


def _usage(output: Output, text: str) -> Exit:
    output.error({"code": "usage", "kind": "Usage", "message": text})
    if not output.as_json:
        output.errors.print("lora-plugins --help says what there is")
    return Exit.USAGE


def _bug(output: Output, error: Exception) -> Exit:
    if _debug:
        traceback.print_exception(error, file=sys.stderr)
    said = (str(error).splitlines() or [""])[0]
    output.error(
        {
            "code": "bug",
            "kind": type(error).__name__,
            "message": f"{type(error).__name__}: {said}. This should not happen; --debug shows where it did",
        }
    )
    return Exit.BUG
