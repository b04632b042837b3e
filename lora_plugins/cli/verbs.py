"""`load`, `unload`, `refresh`, `push` and the other verbs: each calls a route of a running server's admin API.

Runs in the command's process, and sends the calls for four names at the same time. In: names, and a verb's options.
Out: a table with the server's answer for each name, and the errors below the table.

The function of a verb, such as `load`, takes only the verb's own options, and returns a `VerbCall`. `_verb` makes the
command of the function, with the options of every verb (`_of_verbs`) added. The functions' docstrings are the help
texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer
from pydantic import BaseModel, ValidationError

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import MIN_PREFIX
from lora_plugins.api import models
from lora_plugins.cli import UsageProblem
from lora_plugins.cli.name_arguments import Asked, AskedName, NamesFile, expand, wanted
from lora_plugins.cli.output import Output, Result, listed, short, table, with_parameters
from lora_plugins.cli.progress_bars import counted
from lora_plugins.cli.server_client import DEFAULT_URL, AdminClient, ServerUrl, Timeout
from lora_plugins.client.body import archive_of
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.scheduler.pauses import PauseMode

_AT_ONCE = 4  # calls
_OF_ONE = ("uri", "to", "if_match")  # options that are refused where several names are given
_IfMatch = Annotated[str | None, typer.Option("--if-match", help="Only if the served digest is this, or begins so.")]
_Uri = Annotated[str | None, typer.Option(help="Where the adapter lies, if not where its name says; for one name.")]
_Block = Annotated[bool, typer.Option("--block", help="Refuse the names from here on, until they are loaded.")]
_Drain = Annotated[
    float | None,
    typer.Option("--drain", min=0, help="Seconds for running requests; LORA_PLUGINS_DRAIN_TIMEOUT_S without it."),
]
_To = Annotated[str | None, typer.Option("--to", help="The kept version whose digest begins so; for one name.")]
_Mode = Annotated[
    PauseMode | None,
    typer.Option(help="Whether requests end by themselves, are aborted, or go on after the resume; wait without it."),
]
_Answer = models.AdapterStatus | LoRAPluginsError

# The texts, by pydantic's type of error, of what may be wrong with `LoadAdapterRequest` and `RollbackRequest`.
_MEANING = {
    "string_pattern_mismatch": f"not the beginning of a digest: {MIN_PREFIX} characters or more, 0 to 9 and a to f",
    "string_too_long": "longer than {max_length} characters",
    "string_too_short": "empty",
    "string_unicode": "not text in UTF-8",
}


@dataclass(frozen=True, slots=True)
class VerbCall:
    """What is asked of a server for each name.

    Attributes:
        route: method and path, with a space between; `{name}` stands for the name. answer: the type of the answer.
        body: makes the body for a name; None for a call without a body.
        if_match: the digest that must be served, or its beginning; None for any version.
        headers: of the body, if not JSON.
    """

    route: str
    answer: type[models.AdapterStatus] = models.AdapterStatus
    body: Callable[[AskedName], BaseModel | bytes | None] = lambda _: None
    if_match: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def load(*, uri: _Uri = None, if_match: _IfMatch = None) -> VerbCall:
    """Serve adapters, from the server's sources or from URIs.

    A pattern is a name here, as the server's list has only names that are loaded.

    Examples:
        load team/sql
        load sql --uri s3://bucket/loras/sql
        load --file adapters.txt --url http://gpu-7:8000
    """

    def body(one: AskedName) -> BaseModel:
        source = models.AdapterSource(uri=place) if (place := uri or one.uri) else None
        return models.LoadAdapterRequest(lora_name=one.name, source=source)

    return VerbCall("POST ", models.VersionStatus, body, if_match)  # the name is in the body, and not in the path


def unload(*, block: _Block = False, drain_s: _Drain = None) -> VerbCall:
    """Serve adapters no longer, once their requests have ended.

    Examples:
        unload team/sql
        unload 'team/*' --drain 5
        unload team/sql --block
    """
    return VerbCall("DELETE /{name}" + _query(block="true" if block else None, timeout_s=drain_s))


def refresh(*, if_match: _IfMatch = None) -> VerbCall:
    """Look for new versions at the sources now, and swap to them.

    Examples:
        refresh team/sql
        refresh '*' --json
        refresh team/sql --if-match d97bd125c00b
    """
    return VerbCall("POST /{name}/refresh", models.VersionStatus, if_match=if_match)


def rollback(*, to: _To = None, if_match: _IfMatch = None) -> VerbCall:
    """Go back to the version before, until the next refresh or push.

    Examples:
        rollback team/sql
        rollback team/sql --to 583503f503f1
    """

    def body(_: AskedName) -> BaseModel | None:
        return None if to is None else models.RollbackRequest(digest=to)

    return VerbCall("POST /{name}/rollback", models.VersionStatus, body, if_match)


def pin() -> VerbCall:
    """Keep adapters in host memory and in slots.

    Examples:
        pin team/sql team/poet
    """
    return VerbCall("POST /{name}/pin")


def unpin() -> VerbCall:
    """Let pinned adapters be evicted like any other.

    Examples:
        unpin '*'
    """
    return VerbCall("POST /{name}/unpin")


def prefetch() -> VerbCall:
    """Bring adapters into host memory before they are asked for.

    Examples:
        prefetch team/sql team/poet
        prefetch --file adapters.txt
    """
    return VerbCall("POST /{name}/prefetch")


def pause(*, mode: _Mode = None) -> VerbCall:
    """Hold the requests of adapters until a resume.

    Examples:
        pause policy
        pause policy --mode keep
    """
    return VerbCall("POST /{name}/pause" + _query(mode=mode))


def resume() -> VerbCall:
    """Have the requests of paused adapters go on.

    Examples:
        resume policy
    """
    return VerbCall("POST /{name}/resume")


def _of_verbs(
    output: Output,
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names; patterns in quotes ('team/*') stand for names on the server's list."),
    ] = None,
    file: NamesFile = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 600.0,
) -> None:
    """The options of every verb."""


def _verb(call_of: Callable[..., VerbCall]) -> Callable[..., Result]:
    """Return the command of a verb, which calls the server for a few names at the same time.

    An error of one name does not keep the command from calling the server for the other names.
    """

    def command(
        output: Output, names: list[str] | None, file: Path | None, url: str, timeout_s: float, **options: Any
    ) -> Result:
        client, asked, call = AdminClient(url, timeout_s), wanted(names, file), call_of(**options)
        given = [name for name in _OF_ONE if options.get(name) is not None]
        # With `--uri`, a name must not have a URI of its own in the file of names.
        if given and (len(asked) != 1 or (given[0] == "uri" and asked[0].uri is not None)):
            raise UsageProblem(f"--{given[0].replace('_', '-')} is for one name: each of several has its own")
        found: Sequence[Asked] = asked
        if call_of is not load:  # `load` takes a pattern as a name: the server's list has only loaded names
            found = expand(asked, lambda: [adapter.lora_name for adapter in client.adapters().loras], client.url)
        ask = partial(_ask, client, call)
        threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="lora-plugins-admin")
        try:
            answers = [*counted(output, threads.map(ask, found), len(found), "asked")]
        finally:  # at an interrupt, do not wait for the remaining answers
            threads.shutdown(wait=False, cancel_futures=True)
        return _changed(call.answer, answers, client.url)

    return with_parameters(command, call_of, _of_verbs)


def _ask(client: AdminClient, call: VerbCall, one: Asked) -> _Answer:
    """Call the server for one name, and return its answer or its error.

    Raises:
        UsageProblem: the server would refuse the body of the call.
    """
    if isinstance(one, LoRAPluginsError):  # of a pattern that fits no name
        return one
    try:
        body = call.body(one)
        expected = None if call.if_match is None else client.whole_digest(one.name, call.if_match)
        method, path = call.route.format(name=quote(one.name)).split(" ")
        return client.ask(call.answer, method, path, body, if_match=expected, headers=call.headers)
    except ValidationError as error:
        first = error.errors()[0]
        said = _MEANING[first["type"]].format_map(first.get("ctx", {}))
        raise UsageProblem(f"{first['loc'][-1]}: {said}") from None
    except LoRAPluginsError as error:
        error.adapter = error.adapter or one.name
        return error


_CALLS: Sequence[Callable[..., VerbCall]] = (load, unload, refresh, rollback, pin, unpin, prefetch, pause, resume)
VERBS = [_verb(call_of) for call_of in _CALLS]


def _query(**options: Any) -> str:
    """Return the query of a route, from "?" on, of the options that are not None; empty without any."""
    query = urlencode({name: value for name, value in options.items() if value is not None})
    return f"?{query}" if query else ""


def push(
    directory: Annotated[Path, typer.Argument(help="A PEFT directory.")],
    name: Annotated[str, typer.Argument(help="What requests will ask for.")],
    *,
    inflight: Annotated[bool, typer.Option("--inflight", help="Running requests go on with the new version.")] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep the adapter in host memory and in a slot.")] = False,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, max=100, help="Earlier versions that stay, as NAME@DIGEST.")
    ] = None,
    if_match: _IfMatch = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 600.0,
) -> Result:
    """Send an adapter to a server, as the next version of a name.

    Examples:
        push ./out/checkpoint-500 policy
        push ./out policy --if-match d97bd125c00b --keep 8
    """
    if not (directory / CONFIG_FILE).is_file():
        raise UsageProblem(f"{directory}: no directory with {CONFIG_FILE}")
    client = AdminClient(url, timeout_s)
    route = "PUT /{name}" + _query(mode="inflight" if inflight else None, pin="true" if pin else None, keep=keep)
    body, headers = archive_of(directory)
    call = VerbCall(route, models.PushStatus, lambda _: body, if_match, headers)
    return _changed(call.answer, [_ask(client, call, AskedName(name))], client.url)


def _changed(kind: type[models.AdapterStatus], answers: Sequence[_Answer], url: str) -> Result:
    """Return a command's result: a table of the answers, which are of type `kind`, and the errors below the table."""
    heads = ("digest", "previous", "swapped", "took") if issubclass(kind, models.VersionStatus) else ()
    rows = [_row(one) for one in answers if not isinstance(one, LoRAPluginsError)]
    shown = [table(("name", *heads, "result"), rows)] if rows else []
    results = [one if isinstance(one, LoRAPluginsError) else Result(one.model_dump(mode="json")) for one in answers]
    return listed(results, "lora_name", above=shown, url=url)


def _row(one: models.AdapterStatus) -> tuple[str, ...]:
    """Return a table's row: the name, the change of versions if any, and the server's sentence, shortened."""
    versions: tuple[str, ...] = ()
    if isinstance(one, models.VersionStatus):
        took = f"{one.elapsed_ms:.0f} ms" if one.elapsed_ms < 9_999.5 else f"{one.elapsed_ms / 1000:.1f} s"
        versions = short(one.digest), short(one.previous_digest), "yes" if one.swapped else "no", took
    return one.lora_name, *versions, one.message.removeprefix(f"LoRA adapter '{one.lora_name}' ").removesuffix(".")
