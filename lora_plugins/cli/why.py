"""`why`: what a running server says of names, and for the rest what a request would meet, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import typer

from lora_plugins.absence import Absence
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import MISSPELT, misspelt, near, why_absent
from lora_plugins.api.models import AdapterList, AdapterView, ServedState
from lora_plugins.cli import Exit, exit_of
from lora_plugins.cli.base_model import (
    BasePath,
    MaxRank,
    ServedNames,
    compared_with,
    read_base,
    why_not_compared,
    would_be_served,
)
from lora_plugins.cli.lookup import LookUp, look_up
from lora_plugins.cli.names import (
    NamesFile,
    expand,
    is_several,
    malformed,
    names_of_environment,
    together,
    wanted,
)
from lora_plugins.cli.output import Output, Result, ago, error_fields, line, number, short, size, steps_table
from lora_plugins.cli.server import DEFAULT_URL, AdminClient, ServerUrl, Timeout
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError, SourceUnavailable
from lora_plugins.findings import Step, resolvers_not_asked
from lora_plugins.resolvers.search import SourceAnswer
from lora_plugins.resolvers.sources.pushed import LABEL as PUSHED
from lora_plugins.settings import Settings
from lora_plugins.store.blocks import Blocks, blocked
from lora_plugins.store.layout import Layout

_VERDICTS = {
    "not compared": "whole, and not compared",
    "found": "found, and nothing was fetched; without --dry-run it is verified too",
    "unknown": "no source has it; a request gets a 404",
    "refused": "would be refused",
    "unavailable": "unavailable now; a request gets a 503",
    "not asked": "not served now, and this environment names no source to ask",
    "no answer": "the server gives no answer, and this environment names no source to ask",
    "not resolved": "found, and no request finds it: vLLM asks no resolver; set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    "paused": "served, and paused: requests wait for a resume",
}


# The steps of errors without a source.
_PLACES = {Exit.SETTINGS: "settings", Exit.UNAVAILABLE: "fetch", Exit.NO_ROOM: "store"}


@dataclass(slots=True)
class OfServer:
    """A running server's words on a name: the steps, and the adapter, if the server has the name.

    `near`: names like one that nobody has, in words.
    """

    steps: list[Step]
    view: AdapterView | None = None
    is_blocked: bool = False
    near: str = ""

    @property
    def is_the_end(self) -> bool:
        """Whether a request for the name asks no source."""
        return self.is_blocked or (self.view is not None and self.view.state is not ServedState.DRAINING)


def why(
    output: Output,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names as a request's model field has them, or patterns in quotes for what sources list."),
    ] = None,
    *,
    file: NamesFile = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 5.0,
    no_server: Annotated[
        bool, typer.Option("--no-server", help="Ask the sources alone, as a server does at a first request.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Ask the sources and fetch nothing; the store stays as it is.")
    ] = False,
    base_model: BasePath = None,
    served_model_name: ServedNames = None,
    max_lora_rank: MaxRank = None,
) -> Result:
    """Say whether names are served, by which version, and why not."""
    settings = Settings.from_env()
    base = read_base(settings, base_model, served_model_name, max_lora_rank)
    base_path = "" if base is None else base.path
    client = AdminClient(url, timeout_s)
    asked = expand(wanted(names, file), lambda: names_of_environment(settings, base_path), "the sources")
    by_name = {one.name: LookUp(one.name, one.name) for one in asked if not isinstance(one, LoRAPluginsError)}
    well_formed = {name: one for name, one in by_name.items() if malformed(name) is None}
    said = {name: OfServer([]) for name in well_formed} if no_server else _ask(client, well_formed)
    blocks = Blocks(Layout(settings.store_dir))  # every server of the store heeds them
    for name, of_server in said.items():
        view = of_server.view
        of_server.is_blocked = (view is not None and view.state is ServedState.BLOCKED) or name in blocks
    rest = [one for name, one in well_formed.items() if not said[name].is_the_end]
    labels: list[str] = []
    try:
        if rest:
            note = f"fetching into {settings.store_dir}, to verify; --dry-run writes nothing"
            labels = look_up(output, settings, rest, base_path, base, dry_run=dry_run, before_fetch=note)
    except InvalidSettings as error:
        if no_server:
            raise
        for one in rest:
            one.found.error = error
    unknown = [one for one in rest if _is_unknown(one) and not said[one.name].near]
    listed = names_of_environment(settings, base_path, only_local=True) if unknown else ()
    for one in unknown:
        if (like := misspelt(one.name, [name for name in near(one.name, listed) if name not in blocks])) is not None:
            said[one.name].near = like.expected
    warnings = [item._replace(check="vllm", state="warning") for item in resolvers_not_asked(settings)]

    def answer(one: LookUp) -> Result:
        of_server = said.get(one.name, OfServer([]))
        begin = [] if of_server.is_the_end else warnings
        return _result(one, of_server, [*begin, *_steps(one, of_server, labels, base)], base)

    answers = [one if isinstance(one, LoRAPluginsError) else answer(by_name[one.name]) for one in asked]
    return together(answers, is_list=is_several(names, file), blank_between=True)


def _ask(client: AdminClient, names: Iterable[str]) -> Mapping[str, OfServer]:
    """Ask a server for names; a server that does not answer is asked no more."""
    found = {name: OfServer([]) for name in names}
    missing: list[str] = []
    try:
        for name, one in found.items():
            try:
                one.view = client.ask(AdapterView, "GET", f"/{quote(name)}")
                one.steps += _steps_of_server(one.view, client.url)
            except AdapterNotFound as error:
                missing.append(name)
                one.near = error.expected if error.found == MISSPELT else ""
        declared = client.ask(AdapterList, "GET", "?limit=1").declared if missing else None
        declared_as = {} if declared is None else {it.lora_name: it for it in declared.loras}
        for name in missing:
            found[name].steps.append(Step("server", "no", f"{client.url} does not serve it"))
            if (it := declared_as.get(name)) is not None:
                found[name].steps.append(
                    Step("declared", str(it.state), it.error or "in LORA_PLUGINS_ADAPTERS_FILE, and not loaded now")
                )
    except LoRAPluginsError as error:
        for one in found.values():
            one.steps = one.steps or [Step("server", "no answer", error.found, error.remedy)]
    return found


def _steps_of_server(view: AdapterView, url: str) -> Iterator[Step]:
    held = f", {view.requests_held} held until the adapter is loaded or has a slot" if view.requests_held else ""
    requests = f"{number(view.requests_in_flight, 'request')} in flight{held}"
    yield Step("server", "yes", f"{url} has it: {view.state}, {requests}, used {ago(view.last_used_at)}")
    if view.state is not ServedState.BLOCKED:
        facts = f"{size(view.size_bytes)}, in {', '.join(view.tiers) or 'no tier'}"
        yield Step("version", "ok", f"{_version(view)}, {'' if view.rank is None else f'rank {view.rank}, '}{facts}")
    if view.chat is not None:
        template = "its own template" if view.chat.template else "the base model's template"
        ends = [view.chat.end_token or "", *map(str, view.chat.end_ids)]
        yield Step("chat", "ok", f"{template}; ends at {', '.join(filter(None, ends)) or 'the end of the base model'}")
    if view.pinned_digest:
        stays = f"stays at {short(view.pinned_digest)}"
        if view.source == PUSHED:
            yield Step("version", "ok", f"{stays}, which was pushed, until the next push")
        else:
            yield Step("version", "warning", stays, f"lora-plugins refresh {view.lora_name} goes to the newest version")
    yield from (Step("base", "warning", text) for text in view.warnings)
    if view.last_error is not None:
        yield Step("error", "warning", f"{ago(view.last_error.at)}: {view.last_error.message}")
    if view.state is ServedState.PAUSED:
        yield Step("pause", "failed", "new requests wait", f"lora-plugins resume {view.lora_name}")


def _version(view: AdapterView) -> str:
    text = short(view.digest) if view.digest else str(view.path)
    return f"{text} from {view.uri}" if view.uri else text


def _steps(asked: LookUp, of_server: OfServer, labels: Sequence[str], base: BaseModel | None) -> Iterator[Step]:
    """Yield the steps of a request for the name, up to its end; a name that no source can have ends as an error."""
    if (fault := malformed(asked.name)) is not None:
        asked.found.error = fault
        yield Step("name", "failed", str(fault))
        return
    yield Step("name", "ok", "is well-formed")
    yield from of_server.steps
    if of_server.is_blocked:
        asked.found.error = blocked(asked.name)
        yield Step("block", "failed", str(asked.found.error), f"lora-plugins load {asked.name.partition('@')[0]}")
    if of_server.is_the_end:
        return
    yield from (_step_of(label, asked.found.answers.get(label)) for label in labels)
    if of_server.near and not (asked.stored or asked.would_fetch):
        yield Step("spelling", "warning", f"perhaps {of_server.near} was meant")
    if asked.found.error is not None and asked.found.error not in asked.found.answers.values():
        place = _PLACES.get(exit_of(asked.found.error), "adapter")
        yield Step(place, "failed", str(asked.found.error))
    elif asked.would_fetch is not None:
        located = asked.would_fetch
        files = f"{number(len(located.adapter.files), 'file')}, {size(located.size_bytes)}"
        would = f"would fetch {files}, from {located.adapter.uri}"
        yield Step("store", "ok", would if located.stored is None else f"has it: {located.stored}")
        yield Step("adapter", "not checked", "nothing is fetched with --dry-run")
    elif asked.stored is not None:
        event = asked.stored.facts
        how = f"fetched in {event.obtain_s:.2f} s" if event.fetched else "has it"
        yield Step("store", "ok", f"{how}: {event.path}")
        yield Step("adapter", "ok", f"verified: rank {event.rank}, {size(event.size_bytes)}")
        said = "; ".join((*event.warnings, *event.notes))
        verdict, fits = "not checked", "no --base-model was given" if base is None else compared_with(base)
        if base is not None and not _why_not_compared(asked, base):
            verdict, fits = "ok", f"fits {base.path}: {fits}"
        yield Step("base", "warning" if event.warnings else verdict, said or fits)
    elif asked.found.error is None and (reason := why_absent(asked.name)) is not None:
        asked.found.error = reason
        yield Step("revision", "failed", str(reason))


def _is_unknown(asked: LookUp) -> bool:
    return asked.found.error is None and asked.stored is None and asked.would_fetch is None


def _step_of(source: str, answer: SourceAnswer | None) -> Step:
    if answer is None:
        return Step(source, "not asked", "an earlier source has decided")
    if isinstance(answer, LoRAPluginsError):
        return Step(source, "failed", str(answer))
    if isinstance(answer, Absence):
        detail = f"{answer.place}: {answer.detail}" if answer.place else answer.detail
        return Step(source, "no" if answer.was_asked else "not asked", detail, answer.hint)
    files = f"{number(len(answer.files), 'file')}, {size(sum(file.size_bytes for file in answer.files))}"
    return Step(source, "yes", f"{answer.uri}, version {answer.version[:12]}, {files}")


def _why_not_compared(asked: LookUp, base: BaseModel | None) -> str:
    return "" if asked.stored is None else why_not_compared(base, [file.name for file in asked.stored.manifest.files])


def _verdict(asked: LookUp, of_server: OfServer, steps: Sequence[Step], base: BaseModel | None) -> tuple[str, Exit]:
    """Return the verdict by the last step, or by the first: a warning that vLLM asks no resolver."""
    last, is_resolved = steps[-1], steps[0].check != "vllm"
    error = asked.found.error
    if error is not None:
        verdict = "unavailable" if isinstance(error, SourceUnavailable) else "refused"
        is_silent = any(step.state == "no answer" for step in of_server.steps)
        by_step = {"name": "unknown", "revision": "unknown", "settings": "no answer" if is_silent else "not asked"}
        return by_step.get(last.check, verdict), exit_of(error)
    if of_server.view is not None and of_server.is_the_end:
        is_paused = of_server.view.state is ServedState.PAUSED
        return ("paused", Exit.UNAVAILABLE) if is_paused else ("served", Exit.OK)
    if not is_resolved and (asked.stored is not None or asked.would_fetch is not None):
        return "not resolved", Exit.WRONG
    if asked.stored is not None:
        return ("not compared", Exit.NOT_COMPARED) if _why_not_compared(asked, base) else ("served", Exit.OK)
    return ("unknown", Exit.NOT_FOUND) if _is_unknown(asked) else ("found", Exit.OK)


def _in_words(asked: LookUp, of_server: OfServer, verdict: str, base: BaseModel | None) -> str:
    if verdict == "served" and asked.stored is not None:
        return would_be_served(base, asked.stored.facts.rank)
    if verdict == "served" and of_server.view is not None:
        is_warned = any(step.state == "warning" for step in of_server.steps)
        return f"served, version {_version(of_server.view)}{', with a warning above' if is_warned else ''}"
    reason = _why_not_compared(asked, base) if verdict == "not compared" else ""
    return f"{_VERDICTS[verdict]}: {reason}" if reason else _VERDICTS[verdict]


def _result(asked: LookUp, of_server: OfServer, steps: Sequence[Step], base: BaseModel | None) -> Result:
    verdict, code = _verdict(asked, of_server, steps, base)
    fields: dict[str, Any] = {
        "name": asked.name,
        "verdict": verdict,
        "steps": [dict(zip(("step", "verdict", "detail", "hint"), step, strict=True)) for step in steps],
        "server": None if of_server.view is None else of_server.view.model_dump(mode="json"),
        "adapter": None,
    }
    if asked.stored is not None:
        found, event = asked.stored.adapter, asked.stored.facts
        fields["adapter"] = {
            "lora_id": found.adapter_id,
            **{name: getattr(found, name) for name in ("source", "version", "digest")},
            **{name: getattr(event, name) for name in ("path", "rank", "size_bytes", "fetched")},
            "notes": list(event.notes),
        }
    if asked.would_fetch is not None:
        fields["located"] = asked.would_fetch.as_json()
    if asked.found.error is not None:
        fields["error"] = error_fields(asked.found.error)
    style = {Exit.OK: "bold green", Exit.NOT_COMPARED: "bold yellow"}.get(code, "bold red")
    end = line(f"{asked.name}: {_in_words(asked, of_server, verdict, base)}", style)
    return Result(fields, [steps_table(("step", "verdict", ""), steps, {}), line(), end], code)
