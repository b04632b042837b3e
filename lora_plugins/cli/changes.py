"""`load`, `unload`, `refresh`, `rollback`, `pin`, `unpin`, `prefetch`: change what a running server serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated

import typer

from lora_plugins.api.models import AdapterStatus, VersionStatus
from lora_plugins.cli.admin_client import DEFAULT_URL, AdminClient, ServerUrl
from lora_plugins.cli.exits import Exit, UsageProblem
from lora_plugins.cli.output import Json, Output, Quiet, error_fields
from lora_plugins.cli.progress import counted
from lora_plugins.cli.several import AskedName, NamesFile, end_of_several, expand, failure, wanted
from lora_plugins.cli.stored import SHOWN_CHARACTERS
from lora_plugins.errors import LoRAPluginsError

_AT_ONCE = 4

Names = Annotated[
    list[str] | None, typer.Argument(help="Names, or patterns in quotes for what the server lists ('team/*').")
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for each answer.")]
IfMatch = Annotated[
    str | None, typer.Option("--if-match", help="Only if the version that is served has this digest, or begins so.")
]

_Ask = Callable[[AskedName], AdapterStatus]


def load(
    names: Annotated[list[str] | None, typer.Argument(help="Names; patterns stand for themselves here.")] = None,
    *,
    uri: Annotated[
        str | None, typer.Option(help="Where the adapter lies, if not where its name says; for one name.")
    ] = None,
    file: NamesFile = None,
    if_match: IfMatch = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 600.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Serve adapters, from the server's sources or from URIs."""
    asked = wanted(names, file)
    if uri is not None:
        if len(asked) != 1 or asked[0].uri is not None:
            raise UsageProblem("--uri is for one name; --file takes a URI behind each name")
        asked = [AskedName(asked[0].name, uri)]
    _only_one(asked, "--if-match", if_match)
    client = AdminClient(url, timeout_s)
    output = Output(as_json=as_json, quiet=quiet)
    return _change(output, client, asked, lambda one: client.load(one.name, one.uri, if_match), has_patterns=False)


def unload(
    names: Names = None,
    *,
    file: NamesFile = None,
    block: Annotated[
        bool, typer.Option("--block", help="Refuse the names from here on, until they are loaded.")
    ] = False,
    drain_s: Annotated[
        float | None,
        typer.Option(
            "--drain", min=0, help="Seconds that running requests have; LORA_PLUGINS_DRAIN_TIMEOUT_S without it."
        ),
    ] = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 600.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Serve adapters no longer, once their requests have ended."""
    client = AdminClient(url, timeout_s)
    output = Output(as_json=as_json, quiet=quiet)

    def ask(one: AskedName) -> AdapterStatus:
        return client.unload(one.name, block=block, timeout_s=drain_s)

    return _change(output, client, wanted(names, file), ask)


def refresh(
    names: Names = None,
    *,
    file: NamesFile = None,
    if_match: IfMatch = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 600.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Look for new versions at the sources now, and swap to them."""
    asked = wanted(names, file)
    _only_one(asked, "--if-match", if_match)
    client = AdminClient(url, timeout_s)
    output = Output(as_json=as_json, quiet=quiet)
    return _change(output, client, asked, lambda one: client.refresh(one.name, if_match))


def rollback(
    names: Names = None,
    *,
    file: NamesFile = None,
    to: Annotated[
        str | None, typer.Option("--to", help="The kept version whose digest begins so; for one name.")
    ] = None,
    if_match: IfMatch = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 600.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Go back to the version before, until the next refresh."""
    asked = wanted(names, file)
    _only_one(asked, "--if-match", if_match)
    _only_one(asked, "--to", to)
    client = AdminClient(url, timeout_s)
    output = Output(as_json=as_json, quiet=quiet)
    return _change(output, client, asked, lambda one: client.roll_back(one.name, to, if_match))


def _simple(verb: str, says: str) -> Callable[..., Exit]:
    """A command that has no options of its own."""

    def command(
        names: Names = None,
        *,
        file: NamesFile = None,
        url: ServerUrl = DEFAULT_URL,
        timeout_s: Timeout = 600.0,
        quiet: Quiet = False,
        as_json: Json = False,
    ) -> Exit:
        client = AdminClient(url, timeout_s)
        output = Output(as_json=as_json, quiet=quiet)
        return _change(output, client, wanted(names, file), lambda one: client.change(one.name, verb))

    command.__name__, command.__doc__ = verb, says
    return command


pin = _simple("pin", "Keep adapters in host memory and in slots.")
unpin = _simple("unpin", "Let pinned adapters be evicted like any other.")
prefetch = _simple("prefetch", "Bring adapters into host memory before they are asked for.")


def _only_one(asked: Sequence[AskedName], option: str, value: str | None) -> None:
    if value is not None and len(asked) != 1:
        raise UsageProblem(f"{option} is for one name: each has digests of its own")


def _change(
    output: Output, client: AdminClient, asked: Sequence[AskedName], ask: _Ask, *, has_patterns: bool = True
) -> Exit:
    """Ask for every name, a few at once; one that fails keeps none of the others from being asked for."""
    found: list[AskedName | LoRAPluginsError] = list(asked)
    if has_patterns:
        found = expand(asked, lambda: [adapter.lora_name for adapter in client.adapters().loras], client.url)

    def answer(one: AskedName | LoRAPluginsError) -> AdapterStatus | LoRAPluginsError:
        if isinstance(one, LoRAPluginsError):
            return one
        try:
            return ask(one)
        except LoRAPluginsError as error:
            error.adapter = error.adapter or one.name
            return error

    with _threads() as threads:
        answers = [*counted(output, threads.map(answer, found), len(found), "asked")]
    _show(output, answers)
    codes = [failure(output, one) for one in answers if isinstance(one, LoRAPluginsError)]
    as_json = [
        {"lora_name": one.adapter, "error": error_fields(one)}
        if isinstance(one, LoRAPluginsError)
        else one.model_dump(mode="json")
        for one in answers
    ]
    return end_of_several(output, as_json, codes, url=client.url)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads whose answers nobody waits for any more once the command is interrupted."""
    threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="lora-plugins-admin")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _show(output: Output, answers: Sequence[AdapterStatus | LoRAPluginsError]) -> None:
    done = [one for one in answers if isinstance(one, AdapterStatus)]
    if not done:
        return
    if not any(isinstance(one, VersionStatus) for one in done):
        output.table(("name", "result"), [(one.lora_name, _result(one)) for one in done])
        return
    output.table(
        ("name", "digest", "previous", "swapped", "took", "result"),
        [(one.lora_name, *_versions(one), _result(one)) for one in done],
        right=("took",),
    )


def _versions(one: AdapterStatus) -> tuple[str, ...]:
    if not isinstance(one, VersionStatus):
        raise TypeError("unreachable: one command has answers of one kind")
    digests = [(digest or "")[:SHOWN_CHARACTERS] for digest in (one.digest, one.previous_digest)]
    took = f"{one.elapsed_ms:.0f} ms" if one.elapsed_ms < 9_999.5 else f"{one.elapsed_ms / 1000:.1f} s"
    return *digests, "yes" if one.swapped else "no", took


def _result(one: AdapterStatus) -> str:
    """The server's sentence, without the name that stands beside it."""
    return one.message.removeprefix(f"LoRA adapter '{one.lora_name}' ").removesuffix(".")
