"""`load`, `unload`, `refresh`, `push` and the other verbs: the routes of a running server's admin API."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer
from pydantic import BaseModel, ValidationError

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import MIN_PREFIX
from lora_plugins.api.models import (
    AdapterSource,
    AdapterStatus,
    LoadAdapterRequest,
    PushStatus,
    RollbackRequest,
    VersionStatus,
)
from lora_plugins.cli import UsageProblem
from lora_plugins.cli.names import AskedName, NamesFile, expand, listed, wanted
from lora_plugins.cli.output import Output, Result, counted, short, table
from lora_plugins.cli.server import DEFAULT_URL, AdminClient, ServerUrl, Timeout
from lora_plugins.client.body import archive_of
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.scheduler.pauses import PauseMode

_AT_ONCE = 4

_PATTERNS = "Names, or patterns in quotes for names on the server's list ('team/*')."
_NO_PATTERNS = "Names; patterns stand for themselves here."
_IfMatch = Annotated[
    str | None, typer.Option("--if-match", help="Only if the served version's digest is this text, or begins so.")
]
_OPTIONS: dict[str, Any] = {
    "uri": Annotated[
        str | None, typer.Option(help="Where the adapter lies, if not where its name says; for one name.")
    ],
    "block": Annotated[bool, typer.Option("--block", help="Refuse the names from here on, until they are loaded.")],
    "drain_s": Annotated[
        float | None,
        typer.Option(
            "--drain", min=0, help="Seconds that running requests have; LORA_PLUGINS_DRAIN_TIMEOUT_S without it."
        ),
    ],
    "mode": Annotated[
        PauseMode | None,
        typer.Option(
            help="Whether requests end by themselves, are aborted, or go on after the resume; wait without it."
        ),
    ],
    "to": Annotated[str | None, typer.Option("--to", help="The kept version whose digest begins so; for one name.")],
    "if_match": _IfMatch,
}

# What pydantic finds wrong with `LoadAdapterRequest` and `RollbackRequest`.
_MEANING = {
    "string_pattern_mismatch": f"not the beginning of a digest: {MIN_PREFIX} characters or more, 0 to 9 and a to f",
    "string_too_long": "longer than {max_length} characters",
    "string_too_short": "empty",
    "string_unicode": "not text in UTF-8",
}


@dataclass(frozen=True, slots=True)
class Verb:
    """One change of a server's adapters.

    Attributes:
        name: of the command. says: its help. options: the verb's keys of `_OPTIONS`.
        route: method and path of a name. answer: the type of the server's answer.
        body: of the request for a name with these options. has_patterns: whether `team/*` stands for listed names.
    """

    name: str
    says: str
    options: tuple[str, ...] = ()
    answer: type[AdapterStatus] = AdapterStatus
    route: str = "POST /{name}/{verb}"
    body: Callable[[AskedName, dict[str, Any]], BaseModel | None] = lambda _, __: None
    has_patterns: bool = True

    def command(self) -> Callable[..., Result]:
        """Return the function behind the command, with the options of this verb."""

        def run(output: Output, names: list[str] | None, file: Path | None, **given: Any) -> Result:
            client = AdminClient(given.pop("url"), given.pop("timeout_s"))
            return _change(output, client, self, wanted(names, file), given)

        run.__name__, run.__doc__ = self.name, self.says
        says = _PATTERNS if self.has_patterns else _NO_PATTERNS
        options = {
            "output": (Output, inspect.Parameter.empty),
            "names": (Annotated[list[str] | None, typer.Argument(help=says)], None),
            "file": (NamesFile, None),
            **{name: (_OPTIONS[name], False if name == "block" else None) for name in self.options},
            "url": (ServerUrl, DEFAULT_URL),
            "timeout_s": (Timeout, 600.0),
        }
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, (kind, default) in options.items()
        ]
        # Typer reads the signature: each verb has its own options.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    def ask(self, client: AdminClient, one: AskedName, options: dict[str, Any]) -> AdapterStatus:
        """Send the change of one name to a server.

        Raises:
            UsageProblem: the name or an option cannot be right. LoRAPluginsError: the server's error.
        """
        try:
            body = self.body(one, options)
        except ValidationError as error:
            first = error.errors()[0]
            said = _MEANING[first["type"]].format_map(first.get("ctx", {}))
            raise UsageProblem(f"{first['loc'][-1]}: {said}") from None
        expected = options.get("if_match")
        if expected is not None:
            expected = client.whole_digest(one.name, expected)
        method, path = self.route.format(name=quote(one.name), verb=self.name).split(" ")
        return client.ask(self.answer, method, path + _query(options), body, if_match=expected)


def _query(options: dict[str, Any]) -> str:
    asked = {"block": "true" if options.get("block") else None}
    asked |= {"timeout_s": options.get("drain_s"), "mode": options.get("mode")}
    query = {name: value for name, value in asked.items() if value is not None}
    return f"?{urlencode(query)}" if query else ""


def _load(one: AskedName, options: dict[str, Any]) -> LoadAdapterRequest:
    uri = options["uri"] or one.uri
    return LoadAdapterRequest(lora_name=one.name, source=None if uri is None else AdapterSource(uri=uri))


VERBS = (
    Verb(
        "load",
        "Serve adapters, from the server's sources or from URIs.",
        ("uri", "if_match"),
        VersionStatus,
        route="POST ",
        body=_load,
        has_patterns=False,
    ),
    Verb(
        "unload",
        "Serve adapters no longer, once their requests have ended.",
        ("block", "drain_s"),
        route="DELETE /{name}",
    ),
    Verb("refresh", "Look for new versions at the sources now, and swap to them.", ("if_match",), VersionStatus),
    Verb(
        "rollback",
        "Go back to the version before, until the next refresh or push.",
        ("to", "if_match"),
        VersionStatus,
        body=lambda _, options: None if options["to"] is None else RollbackRequest(digest=options["to"]),
    ),
    Verb("pin", "Keep adapters in host memory and in slots."),
    Verb("unpin", "Let pinned adapters be evicted like any other."),
    Verb("prefetch", "Bring adapters into host memory before they are asked for."),
    Verb("pause", "Hold the requests of adapters until a resume.", ("mode",)),
    Verb("resume", "Have the requests of paused adapters go on."),
)


def _change(
    output: Output, client: AdminClient, verb: Verb, asked: Sequence[AskedName], options: dict[str, Any]
) -> Result:
    """Ask for every name, a few at once; a failure keeps no other name from being asked for."""
    if options.get("uri") is not None and (len(asked) != 1 or asked[0].uri is not None):
        raise UsageProblem("--uri is for one name; --file takes a URI behind each name")
    for option in ("if_match", "to"):
        if options.get(option) is not None and len(asked) != 1:
            raise UsageProblem(f"--{option.replace('_', '-')} is for one name: each has digests of its own")
    found: Sequence[AskedName | LoRAPluginsError] = asked
    if verb.has_patterns:
        found = expand(asked, lambda: [adapter.lora_name for adapter in client.adapters().loras], client.url)

    def answer(one: AskedName | LoRAPluginsError) -> AdapterStatus | LoRAPluginsError:
        if isinstance(one, LoRAPluginsError):
            return one
        try:
            return verb.ask(client, one, options)
        except LoRAPluginsError as error:
            error.adapter = error.adapter or one.name
            return error

    threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="lora-plugins-admin")
    try:
        answers = [*counted(output, threads.map(answer, found), len(found), "asked")]
    finally:  # once the command is interrupted, nobody waits for the other answers
        threads.shutdown(wait=False, cancel_futures=True)
    together = listed(
        [one if isinstance(one, LoRAPluginsError) else Result(one.model_dump(mode="json"), []) for one in answers],
        "lora_name",
        url=client.url,
    )
    rows = [row_of(one) for one in answers if not isinstance(one, LoRAPluginsError)]
    versions = ("digest", "previous", "swapped", "took") if verb.answer is VersionStatus else ()
    heads = ("name", *versions, "result")
    tables = [table(heads, rows)] if rows else []
    return Result(together.fields, [*tables, *together.shown], together.code)


def push(
    directory: Annotated[Path, typer.Argument(help="A PEFT directory.")],
    name: Annotated[str, typer.Argument(help="What requests will ask for.")],
    *,
    inflight: Annotated[
        bool, typer.Option("--inflight", help="Running requests go on with the new version, from one step on.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep the adapter in host memory and in a slot.")] = False,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, max=100, help="Earlier versions that stay, as NAME@DIGEST.")
    ] = None,
    if_match: _IfMatch = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 600.0,
) -> Result:
    """Send an adapter to a server, as the next version of a name."""
    if not (directory / CONFIG_FILE).is_file():
        raise UsageProblem(f"{directory}: no directory with {CONFIG_FILE}")
    client = AdminClient(url, timeout_s)
    options = {"mode": "inflight"} if inflight else {}
    options |= {"pin": "true"} if pin else {}
    options |= {} if keep is None else {"keep": str(keep)}
    path = f"/{quote(name)}" + (f"?{urlencode(options)}" if options else "")
    expected = None if if_match is None else client.whole_digest(name, if_match)
    body, headers = archive_of(directory)
    status = client.ask(PushStatus, "PUT", path, body, if_match=expected, headers=headers)
    heads = ("name", "digest", "previous", "swapped", "took", "result")
    return Result(status.model_dump(mode="json"), [table(heads, [row_of(status)])])


def row_of(one: AdapterStatus) -> tuple[str, ...]:
    """Return the name, the change of versions, and the server's sentence, without the name in front."""
    versions: tuple[str, ...] = ()
    if isinstance(one, VersionStatus):
        digests = [short(digest) for digest in (one.digest, one.previous_digest)]
        took = f"{one.elapsed_ms:.0f} ms" if one.elapsed_ms < 9_999.5 else f"{one.elapsed_ms / 1000:.1f} s"
        versions = *digests, "yes" if one.swapped else "no", took
    result = one.message.removeprefix(f"LoRA adapter '{one.lora_name}' ").removesuffix(".")
    return one.lora_name, *versions, result
